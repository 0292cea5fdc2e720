"""`python -m sim.emulator --port 30001 --port 30002`: emulated replicas in one process, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import replace

import uvloop

from sim.emulator import Emulator, EmulatorConfig
from sim.machine import DEFAULT_MACHINE, MACHINES, find_machine


def main() -> None:
    """Prints `ready PORT` for each replica when it listens. SIGTERM drains as the engine does; SIGINT ends at once."""
    parser = _parser()
    options = vars(parser.parse_args())
    ports = options.pop("port") or [0]
    if options["kv_tokens"] is None:
        options["kv_tokens"] = find_machine(options["hardware"]).kv_tokens
    try:
        config = EmulatorConfig(**options)
        replicas = [Emulator(replace(config, port=port)) for port in ports]
    except ValueError as error:
        parser.error(str(error))
    sys.exit(uvloop.run(_serve(replicas)))


async def _serve(replicas: list[Emulator]) -> int:
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    started: list[Emulator] = []
    try:
        for replica in replicas:
            try:
                await replica.start()
            except OSError as error:
                print(f"cannot listen on {replica.config.host}:{replica.config.port}: {error}", file=sys.stderr)
                return 1
            started.append(replica)
            print(f"ready {replica.port}", flush=True)
        loop.add_signal_handler(signal.SIGTERM, _drain, replicas)
        drained = asyncio.ensure_future(_closed(replicas))
        await asyncio.wait((drained, asyncio.ensure_future(interrupted.wait())), return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        for replica in started:
            await replica.stop()


def _drain(replicas: list[Emulator]) -> None:
    for replica in replicas:
        replica.drain()


async def _closed(replicas: list[Emulator]) -> None:
    for replica in replicas:
        await replica.closed()


def _parser() -> argparse.ArgumentParser:
    defaults = EmulatorConfig()
    parser = argparse.ArgumentParser(
        prog="python -m sim.emulator", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--port", type=int, action="append", help="port of a replica, repeatable; a free one when none is given")
    add("--host", default=defaults.host, help="address to listen on")
    add("--model", default=defaults.model, help="served model name")
    add("--time-scale", type=float, default=defaults.time_scale, help="wall-clock seconds per emulated second")
    add("--hardware", choices=MACHINES, default=DEFAULT_MACHINE, help="whose times are emulated")
    add("--kv-tokens", type=int, help="capacity of the KV pool; what fits on the hardware when not given")
    add("--page-size", type=int, default=defaults.page_size, help="tokens in a KV page")
    add("--dp-size", type=int, default=defaults.dp_size, help="data-parallel ranks, with a KV pool each")
    add("--context-length", type=int, default=defaults.context_length, help="longest prompt and answer together")
    add("--max-running-requests", type=int, default=defaults.max_running_requests, help="size of the running batch")
    add("--max-queued-requests", type=int, help="requests that may wait; no limit when not given")
    add("--output-tokens", type=int, default=defaults.output_tokens, help="length of an answer that ends by itself")
    add("--disconnect-seconds", type=float, default=defaults.disconnect_seconds, help="until a leaving client is seen")
    add("--keep-alive-seconds", type=float, default=defaults.keep_alive_seconds, help="until idle connections close")
    add("--api-key", help="key that requests must carry")
    add("--enable-response-store", action="store_true", dest="response_store", help="keep responses, for their ids")
    add(
        "--cache-report",
        action=argparse.BooleanOptionalAction,
        default=defaults.cache_report,
        help="report cached tokens in usage",
    )
    add(
        "--default-include-usage",
        action=argparse.BooleanOptionalAction,
        default=defaults.default_include_usage,
        help="streams end with a usage chunk unless the client says no",
    )
    return parser


if __name__ == "__main__":
    main()
