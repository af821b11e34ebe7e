"""Configuration: where a value comes from, what is refused, and that it survives the way to a child process."""

import argparse
import dataclasses

import pytest

from slipstream import config
from slipstream.config import EngineConfig, ServerConfig
from slipstream.errors import ConfigError


def resolve(argv=(), environ=None, file=None, tmp_path=None):
    parser = argparse.ArgumentParser()
    config.add_flags(parser, EngineConfig, ServerConfig)
    if file is not None:
        path = tmp_path / "c.yaml"
        path.write_text(file)
        argv = [*argv, "--config", str(path)]
    return config.resolve(vars(parser.parse_args(argv)), EngineConfig, ServerConfig, environ=environ or {})


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(tmp_path):
    file = "max-num-seqs: 3\n"
    environ = {"SLIPSTREAM_MAX_NUM_SEQS": "5"}
    assert resolve()[0].max_num_seqs == EngineConfig.max_num_seqs
    assert resolve(file=file, tmp_path=tmp_path)[0].max_num_seqs == 3
    assert resolve(environ=environ, file=file, tmp_path=tmp_path)[0].max_num_seqs == 5
    assert resolve(["--max-num-seqs", "7"], environ, file, tmp_path)[0].max_num_seqs == 7


def test_a_model_may_be_served_under_several_names(tmp_path):
    names = lambda **kw: resolve(**kw)[1].served_model_name
    assert names() == [] and config.served_names(*resolve()) == [EngineConfig.model]
    assert names(argv=["--served-model-name", "gpt-4o", "org/m"]) == ["gpt-4o", "org/m"]
    assert names(environ={"SLIPSTREAM_SERVED_MODEL_NAME": "a b"}) == ["a", "b"]
    assert names(file="served-model-name: [a, b]", tmp_path=tmp_path) == ["a", "b"]
    assert names(file="served-model-name: a", tmp_path=tmp_path) == ["a"]
    with pytest.raises(ConfigError, match="served_model_name"):
        names(file="served-model-name: [[a]]", tmp_path=tmp_path)


@pytest.mark.parametrize("word", ["true", "1", "yes", "on", "TRUE"])
def test_truth_values_from_the_environment(word):
    assert resolve(environ={"SLIPSTREAM_ENABLE_DEBUG": word})[1].enable_debug is True


def test_prefix_caching_and_tensor_parallel_flags():
    assert resolve()[0].enable_prefix_caching is True
    assert resolve(["--no-enable-prefix-caching"])[0].enable_prefix_caching is False
    assert resolve(["--enable-prefix-caching"], {"SLIPSTREAM_ENABLE_PREFIX_CACHING": "0"})[0].enable_prefix_caching is True
    assert resolve(["-tp", "2"])[0].tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("environ", "file", "message"),
    [
        ({"SLIPSTREAM_PORT": "x"}, None, "SLIPSTREAM_PORT: 'x' is not a whole number"),
        ({"SLIPSTREAM_ENABLE_DEBUG": "maybe"}, None, "SLIPSTREAM_ENABLE_DEBUG: 'maybe' is not a truth value"),
        ({"SLIPSTREAM_DTYPE": "bf16"}, None, "SLIPSTREAM_DTYPE: 'bf16' is not one of"),
        ({"SLIPSTREAM_BLOCK_SIZE": "-16"}, None, "SLIPSTREAM_BLOCK_SIZE: -16 is too small"),
        ({}, "max_num_sequences: 3", "unknown key 'max_num_sequences'; did you mean 'max_num_seqs'"),
        ({}, "port: 80.5", "--config: port: 80.5 is not a whole number"),
        ({}, "port: true", "--config: port: True is not a whole number"),
        ({}, "host: [a, b]", "--config: host"),
        ({}, "- a", "must hold keys and values"),
        ({}, "a: [", "--config"),
        ({}, "api_key: ''", "api_key: is empty"),
    ],
)
def test_refusals_name_where_the_value_came_from(environ, file, message, tmp_path):
    with pytest.raises(ConfigError) as e:
        resolve(environ=environ, file=file, tmp_path=tmp_path)
    assert message in str(e.value)


def test_an_empty_file_and_null_values_mean_the_default(tmp_path):
    assert resolve(file="", tmp_path=tmp_path)[0] == EngineConfig()
    assert resolve(file="max_model_len: null\nport: null\n", tmp_path=tmp_path)[1].port == 8000


def test_values_made_in_python_are_checked_too():
    assert config.check(EngineConfig()) == EngineConfig()
    with pytest.raises(ConfigError, match="max_num_seqs: 0"):
        config.check(EngineConfig(max_num_seqs=0))


def test_a_configuration_survives_the_way_to_a_child():
    value = EngineConfig(model="m", max_model_len=5, enable_prefix_caching=False)
    assert config.from_json(EngineConfig, config.to_json(value)) == value


def test_every_field_has_help_and_a_flag():
    parser = argparse.ArgumentParser()
    config.add_flags(parser, EngineConfig, ServerConfig)
    text = parser.format_help()
    for schema in (EngineConfig, ServerConfig):
        for f in dataclasses.fields(schema):
            assert f.metadata["help"]
            assert f.name == "model" or config.flag_name(f.name) in text


def test_an_allowed_origin_has_an_origin_s_form():
    _, server = resolve(["--allowed-origins", "https://a.example", "http://localhost:3000"])
    assert server.allowed_origins == ["https://a.example", "http://localhost:3000"]
    for bad in ("*", "a.example", "https://a.example/", "https://*.example", "https://A.example/x"):
        with pytest.raises(ConfigError, match=r"--allowed-origins: .* is not an origin"):
            resolve(["--allowed-origins", bad])
