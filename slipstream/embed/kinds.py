"""What a model is for, read from its files, and how an embedding or scoring model pools. No torch, no transformers.

Formats: sentence-transformers' modules.json with its folders, and Hugging Face's config.json. A module, pooling mode or
activation that is not known is refused: it would change the vectors.
"""

import json
import pathlib
from typing import Any

import msgspec

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, ModelError
from slipstream.weights.parts import first_architecture, read_config, read_json

_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last_token": "last", "last": "last"}
# families whose positions begin after the padding id, so that a text has fewer tokens than `max_position_embeddings`
_SHIFTED = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "roberta-prelayernorm", "xmod")
_SIGMOID, _IDENTITY = "Sigmoid", "Identity"


class EncoderSpec(msgspec.Struct, frozen=True):
    """How a model's vectors or scores are made. Sent to its process and to front ends as JSON."""

    task: str  # "embed" or "score"
    max_len: int  # tokens of one text, or of a pair of texts
    width: int  # of a vector; 1 for scores
    pooling: str = ""  # of embeddings: "mean", "cls" or "last"
    normalize: bool = False  # vectors have length 1
    dense: tuple[str, ...] = ()  # folders of linear layers after the pooling, in order
    sigmoid: bool = False  # of scores: between 0 and 1

    @property
    def does(self) -> str:
        """What a server of it answers, for the texts of errors."""
        return "embeds texts (/v1/embeddings, /v1/score, /v1/rerank)" if self.task == "embed" else (
            "scores pairs of texts (/v1/score, /v1/rerank)"
        )  # fmt: skip

    def encoded(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decoded(text: str) -> "EncoderSpec | None":
        """None for "": a model that generates."""
        return msgspec.json.decode(text, type=EncoderSpec) if text else None


def encoder_spec(engine: EngineConfig, path: str | pathlib.Path) -> EncoderSpec | None:
    """The encoder at a path as `resolve_model` returns it; None for a model that generates.

    `engine.task` decides where it is not "auto". Raises ModelError for an encoder that cannot be run, ConfigError for flags
    that do not fit it.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():  # a GGUF file, or a config alone
        check_generates(engine, folder.name)
        return None
    config = read_config(folder)
    modules = _modules(folder)
    task = _task(config, modules) if engine.task == "auto" else engine.task
    if task == "generate":
        check_generates(engine, folder.name)
        return None
    _check_flags(engine)
    max_len = _max_len(engine, folder, config)
    return _score(engine, config, max_len) if task == "score" else _embed(engine, folder, config, modules, max_len)


def check_generates(engine: EngineConfig, name: str) -> None:
    """Raises ConfigError for flags of encoders, for a model that cannot be one or is not asked to be one."""
    if engine.task in ("embed", "score"):
        raise ConfigError(f"--task {engine.task}: needs a folder in Hugging Face's form, which {name} is not")
    if engine.pooling != "auto":
        raise ConfigError(f"--pooling {engine.pooling}: is for models that embed; give --task embed too")


def _task(config: dict[str, Any], modules: list[tuple[str, str]]) -> str:
    if modules:
        return "embed"
    name = first_architecture(config)
    if name.endswith("ForSequenceClassification"):
        return "score"
    several = any(key in config for key in ("vision_config", "audio_config", "text_config")) or config.get("is_encoder_decoder")
    if not several and name.endswith(("Model", "ForMaskedLM")) and not name.endswith("LMHeadModel"):
        return "embed"
    return "generate"


def _check_flags(engine: EngineConfig) -> None:
    if engine.tensor_parallel_size != 1:
        raise ConfigError(f"--tensor-parallel-size {engine.tensor_parallel_size}: an encoder runs in one process")
    if engine.device == "sim":
        raise ConfigError("--device sim: does not run encoders; use auto, cpu or cuda")
    if engine.load_format not in ("auto", "safetensors"):
        raise ConfigError(f"--load-format {engine.load_format}: an encoder is read from safetensors; use auto")


def _modules(folder: pathlib.Path) -> list[tuple[str, str]]:
    """modules.json as (kind, folder); [] where there is none."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        rows = json.loads(file.read_text())
        return [(str(row["type"]).rpartition(".")[2], str(row["path"])) for row in sorted(rows, key=lambda row: row["idx"])]
    except (ValueError, KeyError, TypeError) as e:
        raise ModelError(f"{file}: is not a list of modules with idx, path and type: {e}") from None


def _max_len(engine: EngineConfig, folder: pathlib.Path, config: dict[str, Any]) -> int:
    positions = config.get("max_position_embeddings")
    if positions and config.get("model_type") in _SHIFTED:
        positions -= config.get("pad_token_id", 1) + 1
    own = _optional(folder / "sentence_bert_config.json")
    if own.get("do_lower_case"):
        raise ModelError(f"{folder / 'sentence_bert_config.json'}: do_lower_case true is not supported")
    length = own.get("max_seq_length") or positions or _optional(folder / "tokenizer_config.json").get("model_max_length")
    most = min(length, positions) if length and positions else length
    asked = engine.max_model_len
    if asked is not None and positions and asked > positions:
        raise ConfigError(f"--max-model-len {asked}: the model has {positions} positions")
    if asked is not None:
        return asked
    if not isinstance(most, int) or most > 1 << 30:
        raise ModelError(f"{folder / 'config.json'}: has no max_position_embeddings; give --max-model-len")
    return most


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _score(engine: EngineConfig, config: dict[str, Any], max_len: int) -> EncoderSpec:
    if engine.pooling != "auto":
        raise ConfigError(f"--pooling {engine.pooling}: a model that scores pairs has its own; leave it out")
    if not first_architecture(config).endswith("ForSequenceClassification"):
        raise ConfigError(
            f"--task score: {first_architecture(config) or 'the model'} has no classification head; use --task embed"
        )
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))
    if labels != 1:
        raise ModelError(f"config.json: a model with {labels} labels gives no single score; only one with 1 label is served")
    own = config.get("sentence_transformers") or {}
    name = own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or _SIGMOID
    kind = str(name).rpartition(".")[2]
    if kind not in (_SIGMOID, _IDENTITY):
        raise ModelError(f"config.json: the activation {name!r} of the scores is not supported ({_SIGMOID}, {_IDENTITY})")
    return EncoderSpec("score", max_len, 1, sigmoid=kind == _SIGMOID)


def _embed(
    engine: EngineConfig, folder: pathlib.Path, config: dict[str, Any], modules: list[tuple[str, str]], max_len: int
) -> EncoderSpec:
    """Without modules.json: the last token for decoders and the mean for encoders, normalized."""
    width = config.get("hidden_size") or config.get("d_model") or config.get("dim")
    if not isinstance(width, int):
        raise ModelError(f"{folder / 'config.json'}: has no hidden_size")
    if not modules:
        decoder = first_architecture(config).endswith("ForCausalLM") or config.get("is_decoder")
        pooling = ("last" if decoder else "mean") if engine.pooling == "auto" else engine.pooling
        return EncoderSpec("embed", max_len, width, pooling, normalize=True)
    pooling, dense, normalize = "", [], False
    for at, (kind, path) in enumerate(modules):
        if kind == "Transformer" and at == 0 and path in ("", "."):
            continue
        if kind == "Pooling" and not pooling:
            pooling = _pooling(folder / path / "config.json")
        elif kind == "Dense" and pooling and not normalize:
            dense.append(path)
            width = read_json(folder / path / "config.json")["out_features"]
        elif kind == "Normalize" and at == len(modules) - 1:
            normalize = True
        else:
            raise ModelError(f"{folder / 'modules.json'}: module {at}, {kind} in {path!r}, is not supported at this place")
    if not pooling:
        raise ModelError(f"{folder / 'modules.json'}: has no Pooling module")
    pooling = pooling if engine.pooling == "auto" else engine.pooling
    return EncoderSpec("embed", max_len, width, pooling, normalize, tuple(dense))


def _pooling(file: pathlib.Path) -> str:
    config = read_json(file)
    modes = [key[13:].removesuffix("_token").removesuffix("_tokens") for key, on in config.items()
             if key.startswith("pooling_mode_") and on is True]  # fmt: skip
    if "pooling_mode" in config:
        modes = [config["pooling_mode"]] if isinstance(config["pooling_mode"], str) else list(config["pooling_mode"])
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(f"{file}: pooling by {', '.join(modes) or 'nothing'} is not supported; one of mean, cls, lasttoken is")
    return _POOLINGS[modes[0]]
