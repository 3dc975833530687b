"""OpenTelemetry spans, where an OTLP endpoint is configured; elsewhere nothing is imported, exported or warned about.

Configured by OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT),
OTEL_EXPORTER_OTLP_PROTOCOL (grpc by default, or http/protobuf), OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER. Stages of cold
starts, promotions and demotions are always sampled: they are rare and each one matters. The sampler is for requests.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from serve_app.telemetry.last_words import LastWords

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

Attribute = str | int | float | bool

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"

# What an exiting process grants the collector to take its last spans.
EXIT_S = 2.0

_stage_tracer: Tracer | None = None
_request_tracer: Tracer | None = None


def endpoint() -> str:
    """Where traces go, as vLLM and the exporters want it; empty if nowhere. HTTP needs the signal's own path."""
    if os.environ.get(TRACES_ENDPOINT):
        return os.environ[TRACES_ENDPOINT]
    base = os.environ.get(ENDPOINT, "")
    return f"{base.rstrip('/')}/v1/traces" if base and _protocol() == "http/protobuf" else base


def configure(role: str, instance: str) -> bool:
    """Start exporting from this process; False, and no cost, without an endpoint. Idempotent.

    Args:
        role: `slot`, `coordinator` or `proxy`; instance: which one, for the resource `service.instance.id`.
    """
    global _stage_tracer, _request_tracer
    if _stage_tracer is not None or not endpoint():
        return _stage_tracer is not None
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    # vLLM's own processes look for these two names and no others.
    os.environ[TRACES_ENDPOINT], os.environ[TRACES_PROTOCOL] = endpoint(), _protocol()
    resource = Resource.create(resource_attributes(role, instance) | _process())
    processor = BatchSpanProcessor(_exporter())
    # By itself a provider waits half a minute at exit for a collector that does not answer, and a slot that is replaced
    # would keep its GPU for as long.
    stages = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    requests = TracerProvider(resource=resource, shutdown_on_exit=False)
    for provider in (stages, requests):
        provider.add_span_processor(processor)
    atexit.register(LastWords(processor.shutdown, EXIT_S))
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(requests)  # so that vLLM's spans in this process nest under ours
    _stage_tracer, _request_tracer = stages.get_tracer("serve_app"), requests.get_tracer("serve_app")
    return True


class OpenSpan:
    """A span that is ended by hand, possibly with times in the past; does nothing where tracing is off."""

    def __init__(self, span: Span | None) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """W3C trace context, for other processes; empty where tracing is off."""
        return _traceparent(self._span)

    def link(self, traceparent: str) -> None:
        """Point at a span of another trace."""
        context = _span_context(traceparent)
        if self._span is not None and context is not None:
            self._span.add_link(context)

    def end(
        self, attributes: Mapping[str, Attribute] | None = None, error: str = "", end_s: float | None = None
    ) -> None:
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(named(attributes or {}))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if end_s is None else int(end_s * 1e9))


def open_span(
    name: str,
    attributes: Mapping[str, Attribute] | None = None,
    *,
    parent: str = "",
    start_s: float | None = None,
    request: bool = False,
) -> OpenSpan:
    """Start a span without making it current.

    Args:
        parent: a traceparent; empty: the current span, if any.
        start_s: wall clock, seconds since the Unix epoch; None: now.
        request: subject to the sampler; stages are not.
    """
    tracer = _request_tracer if request else _stage_tracer
    if tracer is None:
        return OpenSpan(None)
    span = tracer.start_span(
        name,
        context=_context(parent) if parent else None,
        attributes=named(attributes or {}),
        start_time=None if start_s is None else int(start_s * 1e9),
    )
    return OpenSpan(span)


@contextmanager
def current(span: OpenSpan) -> Iterator[None]:
    """Make `span` the parent of all spans inside, of vLLM's too."""
    if span._span is None:
        yield
        return
    from opentelemetry.trace import use_span

    with use_span(span._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield


@contextmanager
def remote_parent(traceparent: str) -> Iterator[None]:
    """Put all spans inside below a span of another process."""
    if _stage_tracer is None or not traceparent:
        yield
        return
    from opentelemetry import context

    token = context.attach(_context(traceparent))
    try:
        yield
    finally:
        context.detach(token)


def current_traceparent() -> str:
    """W3C trace context of the current span; empty where there is none."""
    if _stage_tracer is None:
        return ""
    from opentelemetry.trace import get_current_span

    return _traceparent(get_current_span())


def resource_attributes(role: str, instance: str) -> dict[str, Attribute]:
    """What all spans of one process say of it."""
    return {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "serve_app"),
        "service.instance.id": instance,
        "serve_app.role": role,
    }


def named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """The attributes as spans carry them, below the package's own name; those with a dot are OpenTelemetry's names."""
    return {name if "." in name else f"serve_app.{name}": value for name, value in attributes.items()}


def _process() -> dict[str, Attribute]:
    return {"process.pid": os.getpid(), "host.name": os.uname().nodename}


def _protocol() -> str:
    return os.environ.get(TRACES_PROTOCOL) or os.environ.get(PROTOCOL) or "grpc"


def _exporter() -> SpanExporter:
    if _protocol() == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint())
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint(), insecure=not endpoint().startswith("https"))


def _context(traceparent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _span_context(traceparent: str):  # type: ignore[no-untyped-def]
    """The SpanContext a traceparent names, None if it is not a valid one."""
    from opentelemetry.trace import get_current_span

    context = get_current_span(_context(traceparent)).get_span_context()
    return context if context.is_valid else None


def _traceparent(span: Span | None) -> str:
    if span is None:
        return ""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
