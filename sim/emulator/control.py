"""/_emulator: a tester's controls, which a real engine does not have.

POST /_emulator/faults   {"ready": false, "queue_full": true, "die_mid_stream_after": 3, "status": 503,
                          "hang": true}
GET  /_emulator/faults   the current ones
GET  /_emulator/log      the last 1,000 inference requests
"""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError


async def faults(request: Request) -> Response:
    """Shows the faults, or changes those named in the body."""
    engine: Engine = request.app.state.engine
    if request.method == "POST":
        try:
            engine.set_faults(msgspec.json.decode(await request.body(), type=dict))
        except (ValueError, msgspec.DecodeError) as error:
            raise ApiError(400, str(error)) from None
    return JSONResponse(engine.faults.as_dict())


async def log(request: Request) -> Response:
    """The requests this replica was sent, oldest first."""
    engine: Engine = request.app.state.engine
    return JSONResponse([asdict(record) for record in engine.log])
