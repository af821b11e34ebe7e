"""The command line: what it imports, how it complains, and that a key leaves the process list."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from slipstream import __version__, cli
from slipstream.commands import generate, sampling
from slipstream.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"slipstream {__version__}\n"
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main([command, "--help"])
    assert e.value.code == 0
    assert f"slipstream {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve?"),
        (["xyz"], "commands: serve, chat"),
        (["serve", "--max-num-seq", "3"], "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs: 0 is too small; it must be at least 1"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs: 'many' is not a whole number"),
        (["serve", "--port", "70000"], "--port: 70000 is too large"),
        (["serve", "--device", "gpu"], "--device: 'gpu' is not one of auto, cpu, cuda, sim"),
        (["serve", "--step-timeout", "nan"], "--step-timeout: nan is not a finite number"),
        (["serve", "--api-key", ""], "--api-key: is empty"),
        (["serve", "--api-key"], "--api-key: expected one argument"),
        (["serve", "--uds", "x" * 200], "--uds: the path has 200 bytes"),
        (["serve", "--chat-template", "/nowhere"], "--chat-template: /nowhere is neither a file nor the text of a template"),
        (["serve", "--config", "/nowhere.yaml"], "--config /nowhere.yaml"),
        (["bench", "closd"], "unknown 'closd'; did you mean closed?"),
        (["bench", "closed", "--concurency", "3"], "did you mean --concurrency?"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, message, capsys):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err.replace("argument --api-key", "--api-key")
    assert err.count("\n") == 1 and err.startswith("slipstream: ") and "Traceback" not in err


def test_an_unknown_model_is_one_line_and_status_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert cli.main(["serve", "no-such-model"]) == 1
    err = capsys.readouterr().err
    assert "no-such-model" in err and "smollm2-135m" in err and err.count("\n") == 1


def test_serve_imports_neither_torch_nor_the_http_stack():
    code = (
        "import sys, slipstream.cli; import slipstream.commands.serve, slipstream.process.server, slipstream.weights.pull;"
        "print([m for m in ('torch', 'starlette', 'uvicorn', 'transformers', 'fastapi') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert out.stdout.strip() == "[]", out.stderr


def test_a_simulated_rank_imports_no_torch():
    """Each start of one would cost two seconds of a core."""
    code = """if True:
        import sys
        from slipstream import config
        from slipstream.device.select import build_executor
        from slipstream.process.board import Board
        from slipstream.rank.worker import open_makers

        engine = config.EngineConfig(device="sim")
        build_executor(engine, sys.argv[1], 0, 1, -1, Board.create(1).writer(0))
        open_makers(engine, sys.argv[1])
        print([m for m in ("torch", "transformers") if m in sys.modules])"""
    model = str(ROOT / "tests" / "data" / "tiny")
    out = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert out.stdout.strip() == "[]", out.stderr


def test_the_key_is_taken_out_of_the_arguments():
    assert cli.strip_key(["serve", "--api-key", "k", "--port", "1"]) == (["serve", "--port", "1"], "k")
    assert cli.strip_key(["--api-key=a=b", "x", "--api-key", "c"]) == (["x"], "c")
    assert cli.strip_key(["serve", "--api-key"]) == (["serve", "--api-key"], None)


@pytest.mark.parametrize("flag", [["--api-key", "hush-42"], ["--api-key=hush-42"]])
def test_the_key_is_visible_neither_in_the_process_list_nor_in_the_environment(flag, tmp_path):
    """The real command, stopped by a FIFO as it reads its prompts, after the key has been parsed."""
    fifo = tmp_path / "config.yaml"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "slipstream.cli", "serve", *flag, "--config", str(fifo)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        seen = "hush-42"
        while "hush-42" in seen and time.monotonic() < deadline:
            time.sleep(0.05)
            seen = pathlib.Path(f"/proc/{child.pid}/cmdline").read_text()
        assert "hush-42" not in seen and "--config" in seen
        with open(fifo, "w") as f:  # it has come as far as reading its file
            assert b"hush-42" not in pathlib.Path(f"/proc/{child.pid}/environ").read_bytes()
            f.write("max_num_seqs: 0\n")
        assert child.wait(30) == 2
        assert child.stderr is not None and "max_num_seqs" in child.stderr.read()
    finally:
        child.kill()
        child.wait()


def test_the_key_arrives_after_the_arguments_were_replaced():
    code = (
        "import sys, types, slipstream.cli as c;"
        "m = types.ModuleType('probe'); m.add_arguments = lambda p: p.add_argument('--api-key');"
        "m.run = lambda a: print(a.api_key, sys.argv[1:]) or 0; sys.modules['probe'] = m;"
        "c.COMMANDS['probe'] = ('probe', 'probe'); sys.exit(c.main())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, "probe", "--api-key", "hush 42"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert out.stdout.strip() == "hush 42 ['probe']", out.stderr


def test_prompts_are_read_from_text_and_json_lines(tmp_path):
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    assert generate._read(str(text), "auto") == [{"prompt": "one"}, {"prompt": "two"}]
    lines = tmp_path / "p.jsonl"
    lines.write_text('"bare"\n{"prompt": [1, 2], "id": 7}\n{"messages": []}\n')
    assert generate._read(str(lines), "auto") == [{"prompt": "bare"}, {"prompt": [1, 2], "id": 7}, {"messages": []}]
    for bad in ("{", "[1]", '{"id": 1}', '{"prompt": "x", "messages": []}'):
        lines.write_text('"fine"\n' + bad)
        with pytest.raises(ConfigError, match="line 2"):
            generate._read(str(lines), "auto")


def test_only_sampling_flags_that_were_given_are_sent():
    parser = cli.Parser(prog="x")
    sampling.add_arguments(parser)
    args = parser.parse(["--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos"])
    assert sampling.read(args) == {"temperature": 0.0, "stop": ["a", "b"], "ignore_eos": True}
