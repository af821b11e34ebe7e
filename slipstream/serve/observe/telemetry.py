"""OpenTelemetry traces of requests, by flag: one span per choice with its queue, prefill and decode inside.

Names follow OpenTelemetry's conventions for generative AI where those have one. No prompt and no answer is ever part of a span.
Spans are sent in batches from the exporter's own thread; spans that the collector does not take are dropped.
"""

import time
from typing import Any

from slipstream import __version__
from slipstream.errors import ConfigError
from slipstream.serve.text.choice import Choice

MISSING = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'slipstream[otel]'"


class Telemetry:
    """Makes spans of finished answers. `exporter` is OpenTelemetry's; `open_telemetry` makes the usual one."""

    def __init__(self, model: str, exporter: Any, group: int = 0):
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(MISSING) from None
        self._model, self._group = model, group
        resource = Resource.create({"service.name": "slipstream", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("slipstream", __version__)

    def parent(self, headers: Any) -> Any:
        """The caller's trace from its `traceparent` header, or None."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {k: headers[k] for k in ("traceparent", "tracestate") if k in headers}
        return TraceContextTextMapPropagator().extract(carrier) if carrier else None

    def record(self, answers: list[Choice], request_id: str, parent: Any) -> None:
        """Spans of one HTTP request's choices, all of which have ended."""
        now = time.monotonic()
        to_epoch = time.time_ns() - int(now * 1e9)
        for answer in answers:
            self._record(answer, request_id, parent, now, to_epoch)

    def _record(self, answer: Choice, request_id: str, parent: Any, now: float, to_epoch: int) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        def at(seconds: float) -> int:
            return to_epoch + int(seconds * 1e9)

        times = answer.times
        end = times.last or now
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.system": "slipstream",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request_id,
            "gen_ai.usage.input_tokens": len(answer.prompt.ids),
            "gen_ai.usage.output_tokens": len(answer.ids),
            "slipstream.choice": answer.index,
            "slipstream.group": self._group,
            "slipstream.cached_tokens": answer.cached_tokens,
        }
        if answer.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = (answer.finish_reason,)
        span = self._tracer.start_span("llm_request", parent, attributes=attributes, start_time=at(times.born))
        if answer.failure is not None:
            span.set_status(Status(StatusCode.ERROR, f"HTTP {answer.failure.status}"))
        inside = set_span_in_context(span)
        stages = (
            ("queue", times.born, times.begun),
            ("prefill", times.begun, times.first),
            ("decode", times.first, times.last),
        )
        for name, since, until in stages:
            if since:
                stage = self._tracer.start_span(
                    name, inside, attributes={"slipstream.group": self._group}, start_time=at(since)
                )
                stage.end(at(until or end))
        span.end(at(end))

    def flush(self) -> None:
        """Sends the spans that are still held back, within a few seconds."""
        self._provider.force_flush(3000)


def open_telemetry(model: str, endpoint: str) -> Telemetry:
    """Traces to a collector that takes OTLP over HTTP (`http://HOST:4318/v1/traces`). ConfigError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(MISSING) from None
    return Telemetry(model, OTLPSpanExporter(endpoint=endpoint))
