"""Spans of requests, as a collector gets them from a real router process."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import queue
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes.process import Router, start_router
from tests.fakes.upstream import Peer, ScriptedUpstream, ok
from tests.fakes.wire import LIMIT_S

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
USAGE = b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}'


class Collector:
    """Takes what is exported by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: queue.Queue[Any] = queue.Queue()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = ExportTraceServiceRequest()
                told.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in told.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            outer.spans.put(span)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing on standard error."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def told(span: Any) -> dict[str, Any]:
    """Attributes by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def _serve(peer: Peer) -> None:
    """As ready as can be, and every POST answered with usage."""
    while True:
        request = await peer.request()
        peer.send(ok(USAGE if request.method == "POST" else b"{}", "content-type: application/json"))


@contextlib.asynccontextmanager
async def _traced(
    log: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Router, ScriptedUpstream]]:
    monkeypatch.setenv("WARMROUTE_TRACING__ENDPOINT", endpoint)
    upstream = await ScriptedUpstream(_serve).start()
    try:
        router = await asyncio.to_thread(start_router, [upstream.url], log)
        try:
            yield router, upstream
        finally:
            await asyncio.to_thread(router.stop)
    finally:
        await upstream.stop()


async def _post(router: Router, **headers: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return (
            await client.post(f"{router.url}/v1/chat/completions", json={"messages": []}, headers=named)
        ).status_code


async def test_a_request_is_one_span_below_the_clients_and_above_the_replicas(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _traced(tmp_path / "router.log", collector.url, monkeypatch) as (router, upstream):
        given = f"00-{TRACE}-{PARENT}-01"
        assert await _post(router, traceparent=given, tracestate="a=b", x_session_affinity="secret") == 200
        span = await asyncio.to_thread(collector.spans.get, timeout=60)
        (request,) = [seen for seen in upstream.requests if seen.method == "POST"]
        url = upstream.url
    assert collector.spans.empty()
    assert request.header("traceparent") == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert request.header("tracestate") == "a=b"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    said = told(span)
    assert said["http.response.status_code"] == 200
    assert said["warmroute.replica"] == url
    assert said["warmroute.reason"] == "new"
    assert said["gen_ai.usage.input_tokens"] == 7
    assert not span.status.code
    assert "secret" not in str(span)


async def test_a_refusal_is_a_span_that_failed(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _traced(tmp_path / "router.log", collector.url, monkeypatch) as (router, upstream):
        await upstream.stop()
        assert await _post(router) == 503
        span = await asyncio.to_thread(collector.spans.get, timeout=60)
    assert told(span)["warmroute.refusal"]
    assert span.status.code == 2


async def test_a_client_that_is_not_sampled_is_not_traced(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _traced(tmp_path / "router.log", collector.url, monkeypatch) as (router, upstream):
        assert await _post(router, traceparent=f"00-{TRACE}-{PARENT}-00") == 200
        (request,) = [seen for seen in upstream.requests if seen.method == "POST"]
    header = request.header("traceparent")
    assert header is not None
    assert header.startswith(f"00-{TRACE}-")
    assert header.endswith("-00")
    assert collector.spans.empty()  # the router has ended: whatever it had is out


async def test_a_collector_that_is_gone_harms_no_request_and_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _traced(tmp_path / "router.log", "http://127.0.0.1:9/v1/traces", monkeypatch) as (router, _):
        assert await _post(router) == 200
        router.signal(signal.SIGTERM)
        assert await asyncio.to_thread(router.wait_end, LIMIT_S) == 0
        said = router.log.read_text()
    assert "opentelemetry" not in said
    assert said.count("collector of traces") <= 1
