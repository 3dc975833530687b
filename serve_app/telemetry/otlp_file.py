"""The ledger's transitions as OTLP/JSON, without any trace backend having been there when they happened.

Each transition is one trace. Ids follow from what the transition is, so that the same one, exported twice, is the same
trace to whoever reads it; they are not those of the spans that were sent to a collector at the time.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from serve_app.telemetry import spans
from serve_app.telemetry.ledger import Interval, Transition, intervals

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span, Tracer

# Protobuf's own JSON mapping writes bytes in base64; OTLP/JSON wants these, and only these, in hexadecimal.
IDS = frozenset({"traceId", "spanId", "parentSpanId"})


def dumps(transitions: Iterable[Transition]) -> str:
    """One object in one line, `{"resourceSpans": [...]}`: what POST /v1/traces and the collector's
    `otlpjsonfile` receiver take."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    finished = [span for transition in transitions for span in _spans(transition)]
    request = MessageToDict(encode_spans(finished), use_integers_for_enums=True)
    return json.dumps({"resourceSpans": []} | _with_hex_ids(request))


def _spans(transition: Transition) -> list[ReadableSpan]:
    """The spans that the slot would have exported, made anew from the records."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    slot = str(transition["slot"])
    resource = Resource.create(spans.resource_attributes("slot", slot))
    kept = InMemorySpanExporter()
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=resource, id_generator=_ids(transition), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("serve_app")
    kind, start_s = str(transition["kind"]), transition["start_s"]
    root = _start(tracer, kind, start_s, None, _root_attributes(transition))
    open_spans: dict[int, Span] = {}
    found = intervals(transition)
    for one in sorted(found, key=lambda one: len(one.path)):  # parents first
        parent = open_spans[id(one.parent)] if one.parent else root
        open_spans[id(one)] = _start(tracer, one.name, one.start_s, parent, _attributes(one))
    for one in found:
        _end(open_spans[id(one)], one.end_s, one.error)
    _end(root, start_s + transition["duration_s"], transition["error"])
    return list(kept.get_finished_spans())


def _root_attributes(transition: Transition) -> dict[str, Any]:
    own = [record for record in transition["stages"] if record["stage"] == transition["kind"]]
    known = {name: transition[name] for name in ("application", "slot", "model", "reason") if transition.get(name)}
    return known | (dict(own[0].get("attributes", {})) if own else {})


def _attributes(one: Interval) -> dict[str, Any]:
    return dict(one.attributes) | ({"rank": one.rank} if one.rank >= 0 else {})


def _start(tracer: Tracer, name: str, start_s: float, parent: Span | None, attributes: dict[str, Any]) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    around = set_span_in_context(parent, Context()) if parent else Context()
    return tracer.start_span(name, around, attributes=spans.named(attributes), start_time=_nanoseconds(start_s))


def _end(span: Span, end_s: float, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(_nanoseconds(end_s))


def _nanoseconds(wall_s: float) -> int:
    return int(wall_s * 1e9)


def _ids(transition: Transition) -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Seeded(RandomIdGenerator):
        def __init__(self) -> None:
            what = (transition.get("application", ""), transition["slot"], transition["kind"], transition["start_s"])
            self._random = random.Random(repr(what))

        def generate_span_id(self) -> int:
            return self._random.randrange(1, 2**64)

        def generate_trace_id(self) -> int:
            return self._random.randrange(1, 2**128)

    return Seeded()


def _with_hex_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_hex_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64decode(one).hex() if key in IDS and isinstance(one, str) else _with_hex_ids(one)
        for key, one in value.items()
    }
