"""The operator's commands: what they make of a server's answers. No server is needed."""

import json
import pathlib
import re
import resource

import pytest

from slipstream.client.remote import Remote
from slipstream.commands import doctor, trace
from slipstream.commands.top import View, quantile, total
from slipstream.device.cuda import graphs
from slipstream.errors import ConfigError, EngineDown

ROOT = pathlib.Path(__file__).resolve().parents[2]


def histogram(**counts: float) -> dict:
    """Cumulative buckets by upper edge, `inf` last."""
    edges = {"a": "0.1", "b": "0.2", "c": "+Inf"}
    return {"t_bucket": [({"le": edges[k]}, v) for k, v in counts.items()]}


def test_a_quantile_is_of_what_came_between_two_looks():
    before, now = histogram(a=100, b=100, c=100), histogram(a=100, b=110, c=110)
    assert quantile(now, before, "t", 0.5) == pytest.approx(0.15)
    assert quantile(now, now, "t", 0.5) is None


def test_a_quantile_beyond_the_last_edge_is_that_edge():
    assert quantile(histogram(a=0, b=0, c=4), histogram(a=0, b=0, c=0), "t", 0.99) == pytest.approx(0.2)


def test_totals_pick_by_label():
    metrics = {"steps": [({"order": "overlap"}, 3.0), ({"order": "no_overlap"}, 1.0)]}
    assert total(metrics, "steps") == 4 and total(metrics, "steps", order="overlap") == 3


class Scripted(Remote):
    def __init__(self, answers: list[str], ranks: list[dict]):
        super().__init__("http://127.0.0.1:1", None)
        self.answers, self.ranks = answers, ranks

    def text(self, path: str) -> str:
        if path == "/metrics":
            return self.answers.pop(0)
        return json.dumps({"status": "ok"} if path == "/health" else self.ranks)


def test_top_shows_rates_and_a_rank_that_waits():
    from rich.console import Console

    def look(tokens: int, steps: int) -> str:
        return (
            f"# TYPE slipstream:generation_tokens counter\nslipstream:generation_tokens_total {tokens}\n"
            f'# TYPE slipstream:steps counter\nslipstream:steps_total{{order="overlap"}} {steps}\n'
            "# TYPE slipstream:num_requests_running gauge\nslipstream:num_requests_running 7\n"
        )

    rank = dict(group=0, rank=1, pid=42, state="ready", phase="wait", weight_bytes=5 << 20, launched=9, settled=8, waits_for=0)
    view = View(Scripted([look(0, 0), look(500, 10)], [rank]))
    view.look()
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view.render())
    text = console.export_text()
    assert re.search(r"running +7", text) and re.search(r"overlapped +100%", text) and "waits for" in text and "rank 0" in text


def engine_metrics(steps: int, restarts: int = 0, **eager: int) -> str:
    lines = [f'slipstream:steps_total{{order="overlap"}} {steps}']
    lines += [f'slipstream:eager_steps_total{{reason="{reason}"}} {n}' for reason, n in eager.items()]
    return "\n".join([*lines, f'slipstream:group_restarts_total{{group="0"}} {restarts}', ""])


def test_top_shows_why_steps_of_the_last_moment_ran_eager():
    from rich.console import Console

    view = View(Scripted([engine_metrics(100, sampling=90, grammar=5), engine_metrics(200, 2, sampling=115, grammar=5)], []))
    view.look()
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view.render())
    text = console.export_text()
    assert re.search(r"eager steps +sampling 25% ", text) and "grammar" not in text and re.search(r"restarts +2", text)


def test_doctor_says_what_makes_a_running_server_s_steps_eager():
    def findings(text: str) -> list[doctor.Finding]:
        return list(doctor.running_server(Scripted([text], [])))

    slow, restarts = findings(engine_metrics(200, 2, sampling=50, grammar=4))
    assert slow.state == doctor.POOR and "sampling 25%" in slow.found and "top_k" in slow.advice
    assert restarts.found.startswith("2 ")
    (few,) = findings(engine_metrics(200, sampling=3))
    assert few.state == doctor.GOOD and "sampling 2%" in few.found
    (none,) = findings(engine_metrics(200))
    assert none.state == doctor.GOOD and none.found == "none of 200"
    (foreign,) = findings("<html>")
    assert foreign.state == doctor.POOR and "127.0.0.1" in foreign.found


def test_doctor_has_advice_for_every_reason_to_run_eager():
    assert doctor.EAGER_ADVICE.keys() == set(graphs.EAGER_REASONS)


def test_remote_names_what_is_wrong():
    with pytest.raises(ConfigError, match="--base-url"):
        Remote("localhost:8000", None)
    with pytest.raises(EngineDown, match="does not answer"):
        Remote("http://127.0.0.1:9", None).text("/health")


def test_trace_draws_a_lane_for_each_thread(tmp_path):
    events = [
        {"ph": "M", "pid": 0, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": "group 0 rank 0"}},
        {"ph": "M", "pid": 0, "tid": 1, "ts": 0, "name": "thread_name", "args": {"name": "loop"}},
        {"ph": "X", "pid": 0, "tid": 1, "ts": 10.0, "dur": 5.0, "name": "plan"},
        {"ph": "X", "pid": 0, "tid": 2, "ts": 15.0, "dur": 900.0, "name": "device"},
    ]
    trace.draw(events, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_doctor_says_what_to_do(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000")
    assert doctor.cpu_quota(8, str(quota)).state == doctor.POOR
    quota.write_text("max 100000")
    assert doctor.cpu_quota(8, str(quota)).state == doctor.GOOD
    assert doctor.threads({"OMP_NUM_THREADS": "1"}, 8).advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "ulimit" in doctor.open_files().advice


def test_the_dashboard_asks_for_metrics_that_exist():
    source = (ROOT / "slipstream/serve/observe/metrics.py").read_text()
    dashboard = (ROOT / "deploy/grafana.json").read_text()
    for name in set(re.findall(r"slipstream:(\w+)", dashboard)):
        bare = re.sub(r"_bucket$", "", name)
        assert f'"{bare}"' in source or f'"{bare.removesuffix("_total")}"' in source, name


def test_the_grace_periods_fit_the_drain():
    unit = (ROOT / "deploy/slipstream.service").read_text()
    pod = (ROOT / "deploy/kubernetes.yaml").read_text()
    for text, pattern in ((unit, r"TimeoutStopSec=(\d+)"), (pod, r"terminationGracePeriodSeconds: (\d+)")):
        drain = float(re.search(r"--drain-timeout\D+(\d+)", text).group(1))
        assert float(re.search(pattern, text).group(1)) >= drain + 10
