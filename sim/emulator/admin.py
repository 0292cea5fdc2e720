"""Health and administration."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sim.emulator import body as bodies
from sim.emulator.engine import Engine

_HEALTH_TIMEOUT_SECONDS = 20
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


async def ready(request: Request) -> Response:
    """GET /ready: a flag check."""
    engine: Engine = request.app.state.engine
    refused = engine.draining or engine.paused or engine.unhealthy or not engine.faults.ready
    return Response(status_code=503 if refused else 200)


async def health(request: Request) -> Response:
    """GET /health and /health_generate: looks once a (scaled) second whether the scheduler lives, for 20 s.

    A failure also turns /ready to 503, until a later success.
    """
    engine: Engine = request.app.state.engine
    if engine.draining or not engine.faults.ready:
        return Response(status_code=503)
    for _ in range(_HEALTH_TIMEOUT_SECONDS):
        await asyncio.sleep(engine.scale)
        if not engine.faults.hang:
            engine.unhealthy = False
            return Response()
    engine.unhealthy = True
    return Response(status_code=503)


async def ping(request: Request) -> Response:
    """GET /ping: also 200 while paused."""
    return Response(status_code=503 if request.app.state.engine.unhealthy else 200)


async def root(request: Request) -> Response:
    """GET /: the process is there."""
    return Response()


async def flush_cache(request: Request) -> Response:
    """GET or POST /flush_cache."""
    engine: Engine = request.app.state.engine
    flushed = engine.flush_cache()
    response = PlainTextResponse(_FLUSHED if flushed else "Flush cache failed.\n", 200 if flushed else 400)
    del response.headers["content-type"]
    return response


async def abort_request(request: Request) -> Response:
    """POST /abort_request {"rid": ...} or {"abort_all": true}: always 200."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "abort_request")
    if body.get("abort_all"):
        engine.abort_all()
    elif body.get("rid"):
        engine.abort_rid(str(body["rid"]))
    return Response()


async def pause_generation(request: Request) -> Response:
    """POST /pause_generation: new requests are taken and wait; with mode `abort` the running ones end."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "pause_generation")
    mode = body.get("mode", "abort")
    if mode == "abort":
        engine.abort_all()
    engine.set_paused(True)
    return JSONResponse({"message": f"Generation paused successfully with mode={mode}.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    """POST /continue_generation."""
    engine: Engine = request.app.state.engine
    engine.set_paused(False)
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})
