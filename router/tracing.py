"""OpenTelemetry: one span for each request, exported by the SDK's own thread. Needs the extra `otel`.

The client's `traceparent` is the parent; the replica gets the span's own, so that an engine that traces hangs below it.
Names of attributes follow OpenTelemetry's semantic conventions for HTTP servers and generative AI where they have one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import Thread
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from policies.types import Outcome, Usage
from router.logs import line
from router.settings import TracingSettings

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

log = logging.getLogger("warmroute.tracing")

_CONTEXT = (b"traceparent", b"tracestate")

CLOSE_S = 3.0
"""How long the end of the process waits for the last spans: a collector that is gone must not hold it up."""


class _Exporter(OTLPSpanExporter):
    """Says once that a collector takes nothing, and once that it does again; the SDK says so at every try."""

    _trouble = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        trouble = result is not SpanExportResult.SUCCESS
        if trouble is not self._trouble:
            self._trouble = trouble
            if trouble:
                log.warning("the collector of traces takes nothing: spans are lost until it does")
            else:
                log.info("the collector of traces takes spans again")
        return result


class Tracing:
    """Makes spans and hands them to the exporter; when that falls behind, its bounded queue drops them."""

    def __init__(self, settings: TracingSettings, version: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # see _Exporter
        resource = Resource.create({"service.name": settings.service, "service.version": version})
        self._provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(settings.sample))
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint=settings.endpoint)))
        self._tracer = self._provider.get_tracer("warmroute", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, exchange: Exchange) -> None:
        """A request has arrived whole: open its span, and name it to the replica as the parent of what comes."""
        given: dict[str, str] = {}
        rest = []
        for header in exchange.headers:
            if header[0] in _CONTEXT:
                given.setdefault(header[0].decode(), header[2].decode("latin-1"))
            else:
                rest.append(header)
        span = self._tracer.start_span(
            exchange.method.decode("latin-1"),
            self._propagator.extract(given),
            SpanKind.SERVER,
            start_time=_epoch_ns(exchange.started_at, exchange.proxy.clock()),
        )
        exchange.span = span
        told: dict[str, str] = {}
        self._propagator.inject(told, set_span_in_context(span))
        exchange.headers = rest + [(name.encode(), name.encode(), value.encode()) for name, value in told.items()]

    def end(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """The request is over: say in its span what the log's line says."""
        span = exchange.span
        if span is None:
            return
        if isinstance(span, Span) and span.is_recording():
            said = line(exchange, outcome, usage, now)
            told = {
                "http.request.method": said.method,
                "url.path": said.path,
                "http.response.status_code": said.status,
                "http.request.body.size": said.bytes_in,
                "gen_ai.usage.input_tokens": said.prompt_tokens,
                "gen_ai.usage.output_tokens": said.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": said.cached_tokens,
                "warmroute.request_id": said.request_id,
                "warmroute.cause": said.cause,
                "warmroute.phase": said.phase,
                "warmroute.tries": said.tries,
                "warmroute.replica": said.replica,
                "warmroute.reason": said.reason,
                "warmroute.session": said.session,
                "warmroute.refusal": said.refusal,
                "warmroute.expected_wait_s": said.wait_s,
                "warmroute.expected_prefill_s": said.prefill_s,
                "warmroute.first_byte_s": said.first_byte_s,
                "warmroute.resident_tokens": said.resident_tokens,
            }
            span.set_attributes({name: value for name, value in told.items() if value is not None})
            if said.status is None or said.status >= 500 or outcome.cause != "done":
                span.set_status(StatusCode.ERROR, f"ended by {said.cause} in {said.phase}")
        span.end(end_time=_epoch_ns(now, now))

    def close(self) -> None:
        """Export what is left, for as long as is worth waiting."""
        ending = Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def _epoch_ns(at: float, now: float) -> int:
    """A time of the monotonic clock, which shows `now`, as the wall clock has it."""
    return time.time_ns() - int((now - at) * 1e9)
