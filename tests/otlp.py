"""A real OTLP trace receiver in a process of its own: `python -m tests.otlp PORT FILE [grpc|http/protobuf]`.

Appends one JSON line a span.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class File:
    """Where the spans go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, request: Any) -> None:
        lines = [json.dumps(span) for span in spans_of(request)]
        with self._lock, self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans over gRPC."""

    def __init__(self, file: File) -> None:
        self._file = file

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """One batch of spans."""
        self._file.write(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def http_receiver(file: File) -> type[BaseHTTPRequestHandler]:
    """Takes spans over HTTP, at the one path that the protocol knows."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            is_ours = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_ours:
                file.write(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_ours else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(trace_service_pb2.ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def spans_of(request: Any) -> list[dict[str, Any]]:
    """The spans of an ExportTraceServiceRequest as plain values."""
    return [
        _span(span, _attributes(resource.resource.attributes))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _span(span: Any, resource: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "start_s": span.start_time_unix_nano / 1e9,
        "end_s": span.end_time_unix_nano / 1e9,
        "attributes": _attributes(span.attributes),
        "links": [link.trace_id.hex() for link in span.links],
        "error": span.status.message,
        "resource": resource,
    }


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def serve(port: int, path: Path, protocol: str = "grpc") -> None:
    """Receive until the process is ended."""
    if protocol == "http/protobuf":
        ThreadingHTTPServer(("127.0.0.1", port), http_receiver(File(path))).serve_forever()
        return
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(File(path)), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
