"""`slipstream bench` against a small server: what it sends, what it counts, and its exit status."""

import json

import pytest

from slipstream import cli
from tests.client.fake_server import MAX_LEN, VOCAB, FakeServer, token

SMALL = ["--scale", "0.05", "--processes", "2"]


def bench(*args):
    return cli.main(["bench", *args])


def test_closed_sends_ten_times_the_concurrency_and_reports_all(tmp_path, capsys):
    out = tmp_path / "r.json"
    picture = tmp_path / "r.png"
    with FakeServer() as server:
        assert (
            bench("closed", "--base-url", server.url, "--concurrency", "4", *SMALL, "--json", str(out), "--plot", str(picture))
            == 0
        )
        measured = [b for b in server.bodies if b.get("stream")][4:]
    report = json.loads(out.read_text())
    assert report["figures"]["completed"] == len(report["requests"]) == len(measured) == 40
    assert sorted(len(b["prompt"]) for b in measured) == [10] * 32 + [150] * 8
    assert all(b["temperature"] == 0 and b["ignore_eos"] and b["max_tokens"] == 13 for b in measured)
    assert all(0 < t < VOCAB for b in measured for t in b["prompt"])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "ITL p99.9, ms" in capsys.readouterr().out


def test_errors_are_counted_shown_and_make_the_status_nonzero(tmp_path, capsys):
    out = tmp_path / "r.json"
    with FakeServer(
        faults=lambda b: {150: "busy", 10: "short"}.get(len(b["prompt"])) if b["max_tokens"] == 13 else None
    ) as server:
        assert bench("closed", "--base-url", server.url, "--concurrency", "2", *SMALL, "--json", str(out)) == 1
    figures = json.loads(out.read_text())["figures"]
    assert (figures["requests"], figures["completed"], figures["errors"]) == (20, 0, 20)
    assert figures["error_reasons"]["HTTP 429: the queue is full"] == 4
    assert "12 of 13 tokens received (finish reason length)" in figures["error_reasons"]
    assert "16 x 12 of 13" in capsys.readouterr().out


def test_rate_and_burst_complete():
    with FakeServer() as server:
        assert bench("rate", "--base-url", server.url, "--rate", "100", "--requests", "20", *SMALL) == 0
        lengths = [
            "--burst-input-min",
            "2000",
            "--burst-input-max",
            "3000",
            "--stream-output-len",
            "30000",
            "--warmup",
            "2",
            "--burst-delay",
            "0.1",
        ]
        assert bench("burst", "--base-url", server.url, "--streams", "2", "--prompts", "3", *SMALL, *lengths) == 0


def test_a_burst_whose_streams_were_over_before_it_is_no_measurement(capsys):
    with FakeServer() as server:
        lengths = ["--burst-input-max", "16000", "--stream-output-len", "100", "--warmup", "0", "--burst-delay", "0.5"]
        assert bench("burst", "--base-url", server.url, "--streams", "2", "--prompts", "2", *SMALL, *lengths) == 1
    assert "--stream-output-len" in capsys.readouterr().out


def test_every_turn_carries_the_real_history_and_some_clients_leave(tmp_path):
    out = tmp_path / "r.json"
    with FakeServer(delay=0.0005) as server:
        args = ["--conversations", "12", "--concurrency", "3", "--leave", "0.5", "--warmup", "0", "--processes", "2"]
        assert bench("multi-turn", "--base-url", server.url, *args, "--json", str(out)) == 0
        bodies = [b for b in server.bodies if b.get("stream")]
    report = json.loads(out.read_text())
    figures = report["figures"]
    assert figures["turns_completed"] == figures["turns_expected"] > 12
    assert figures["clients_left"] > 0
    prompts = [b["prompt"] for b in bodies]
    for r in report["requests"]:
        if r["turn"] and r["turn"] > 0:
            mine = next(p for p in prompts if len(p) == r["prompt_len"])
            before = next(b for b in bodies if len(b["prompt"]) < len(mine) and mine[: len(b["prompt"])] == b["prompt"])
            answer = [token(before["prompt"], i, None) for i in range(before["max_tokens"])]
            start = len(before["prompt"])
            assert mine[start : start + len(answer)] == answer
    assert max(map(len, prompts)) <= MAX_LEN


def test_a_server_without_token_ids_is_measured_by_its_usage():
    with FakeServer(ids=False) as server:
        assert bench("closed", "--base-url", server.url, "--concurrency", "2", *SMALL) == 0
        assert "return_token_ids" not in server.bodies[-1]
        assert bench("multi-turn", "--base-url", server.url) == 2


PARITY = ["--prompts", "8", "--output-len", "12", "--longest", "60"]


def test_parity_of_equal_servers_holds_and_of_a_saved_file(tmp_path):
    file = str(tmp_path / "a.json")
    with FakeServer() as a, FakeServer() as b:
        one = [*PARITY, "--concurrency", "4"]
        assert bench("parity", "--base-url", a.url, "--against", b.url, *one, "--save", file) == 0
        assert bench("parity", "--base-url", b.url, "--load", file, *one) == 0
        assert bench("parity", "--base-url", b.url, "--load", file, *one, "--seed", "5") == 2
        assert bench("parity", "--base-url", b.url, *PARITY, "--concurrency", "1,4") == 0


@pytest.mark.parametrize(("gap", "status"), [(1e-5, 0), (0.1, 1)])
def test_parity_accepts_a_difference_only_within_the_margin(gap, status, capsys, tmp_path):
    def skew(prompt, position):
        return int(position == 5 and len(prompt) == 60)

    with FakeServer(gap=gap) as a, FakeServer(skew=skew, gap=gap) as b:
        args = [*PARITY, "--concurrency", "4", "--sets", "greedy", "--json", str(tmp_path / "parity.json")]
        assert bench("parity", "--base-url", a.url, "--against", b.url, *args) == status
    assert "greedy/4, prompt 7, step 5" in capsys.readouterr().out
    report = json.loads((tmp_path / "parity.json").read_text())
    assert [(d["setting"], d["prompt"], d["step"]) for d in report["differences"]] == [("greedy/4", 7, 5)]
    assert report["figures"]["margin_max"] == report["figures"]["margin_p50"] == pytest.approx(gap, rel=0.1)


def test_near_ties_may_be_bounded():
    with FakeServer(gap=1e-5) as a, FakeServer(skew=lambda prompt, position: 1, gap=1e-5) as b:
        args = ["--base-url", a.url, "--against", b.url, *PARITY, "--concurrency", "4", "--sets", "greedy"]
        assert bench("parity", *args, "--max-flips", "7") == 1
        assert bench("parity", *args, "--max-flips", "8") == 0


def test_a_seeded_difference_is_judged_with_the_noise_of_the_draw():
    """Equal log probabilities are no tie when the draw's noise tells the tokens apart."""
    with FakeServer(gap=0.0) as a, FakeServer(skew=lambda prompt, position: int(position == 3), gap=0.0) as b:
        args = ["--base-url", a.url, "--against", b.url, *PARITY, "--concurrency", "4", "--sets"]
        assert bench("parity", *args, "greedy") == 0
        assert bench("parity", *args, "seeded") == 1


def test_what_cannot_be_measured_is_said_before_it_is_tried(capsys):
    with FakeServer() as server:
        assert bench("burst", "--base-url", server.url) == 2
        assert "--scale" in capsys.readouterr().err
        assert bench("closed", "--base-url", server.url, "--model", "other") == 1
        assert "the server has fake" in capsys.readouterr().err
    assert bench("closed", "--base-url", "http://127.0.0.1:1") == 1
    assert "cannot connect" in capsys.readouterr().err
    assert bench("parity", "--concurrency", "4") == 2


def test_copy_measures_with_and_without_drafts(tmp_path):
    out = tmp_path / "r.json"
    with FakeServer() as server:
        assert bench("copy", "--base-url", server.url, "--rounds", "1", *SMALL, "--json", str(out)) == 0
        asked = [b for b in server.bodies if b.get("stream")]
    assert [b.get("speculative_tokens", "all") for b in asked] == [0, "all"] * 4
    figures = json.loads(out.read_text())["figures"]
    assert figures["copy_ratio"] > 0 and figures["story_ratio"] > 0 and figures["answers_changed"] == 0
