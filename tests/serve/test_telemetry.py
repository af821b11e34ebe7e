"""Traces and log lines: what they hold, and that prompts and answers are not in them."""

import json
import logging

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is part of the development extras")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipstream.serve.observe.logs import JsonFormatter
from slipstream.serve.observe.telemetry import Telemetry


class Prompt:
    ids = [1, 2, 3]


class Failure:
    status = 500


class Ended:
    """What a trace reads of an answer."""

    def __init__(self, times, finish_reason="stop", failure=None):
        self.index, self.prompt, self.ids, self.cached_tokens = 0, Prompt(), [7, 8], 2
        self.times, self.finish_reason, self.failure = times, finish_reason, failure


def spans_of(*answers, headers=None):
    from slipstream.serve.text.choice import Times  # noqa: F401  (the type that `times` has)

    exporter = InMemorySpanExporter()
    telemetry = Telemetry("m", exporter)
    telemetry.record(list(answers), "cmpl-1", telemetry.parent(headers or {}))
    telemetry.flush()
    return {s.name: s for s in exporter.get_finished_spans()}


def test_a_trace_has_queue_prefill_and_decode_end_to_end():
    from slipstream.serve.text.choice import Times

    spans = spans_of(Ended(Times(10.0, 10.5, 11.0, 12.0)))
    whole, queue, prefill, decode = (spans[n] for n in ("llm_request", "queue", "prefill", "decode"))
    assert [s.end_time - s.start_time for s in (queue, prefill, decode)] == [500_000_000, 500_000_000, 1_000_000_000]
    assert whole.start_time == queue.start_time and whole.end_time == decode.end_time
    assert all(s.parent.span_id == whole.context.span_id for s in (queue, prefill, decode))
    assert whole.attributes["gen_ai.usage.input_tokens"] == 3 and whole.attributes["gen_ai.usage.output_tokens"] == 2
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_request_that_failed_in_the_queue_has_no_later_stage():
    from slipstream.serve.text.choice import Times

    spans = spans_of(Ended(Times(10.0), None, Failure()))
    assert set(spans) == {"llm_request", "queue"} and not spans["llm_request"].status.is_ok


def test_a_trace_joins_its_callers():
    from slipstream.serve.text.choice import Times

    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    span = spans_of(Ended(Times(1.0, 2.0, 3.0, 4.0)), headers=header)["llm_request"]
    assert (
        f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        and f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    )


def test_json_log_lines_are_one_object_each():
    record = logging.LogRecord("slipstream.http", logging.INFO, "", 0, "POST %s\n%d", ("/v1", 200), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    value = json.loads(line)
    assert value["message"] == "POST /v1\n200" and value["level"] == "info" and value["time"].endswith("Z")
