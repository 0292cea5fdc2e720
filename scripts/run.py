"""What `make run` does: warmroute in front of three emulated replicas, or of the real ones in REPLICAS.

Environment: REPLICAS (comma-separated URLs), PORT (8080), ADMIN_PORT (8081), POLICY (session_affinity).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from types import FrameType

EMULATED = 3
HOST = "127.0.0.1"
"""Not from the environment: shells and conda set HOST for ends of their own."""


class _Stopped(Exception):
    """A signal came before the router ran."""


def stopped(_number: int, _frame: FrameType | None) -> None:
    raise _Stopped


def check_free(name: str, port: str) -> None:
    """Exit with the remedy when the port cannot be had: before anything is started or printed."""
    try:
        socket.create_server((HOST, int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a port"
        sys.exit(f"warmroute: cannot listen on {HOST}:{port} ({name}): {why}. Try PORT=8090 ADMIN_PORT=8091 make run")


def emulator_process(count: int) -> subprocess.Popen[str]:
    """Start emulated replicas on free ports."""
    command = [sys.executable, "-m", "sim.emulator", *["--port", "0"] * count, "--page-size", "1"]
    command += ["--default-include-usage"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def urls_of(emulator: subprocess.Popen[str], count: int) -> list[str]:
    """Their URLs, once they listen."""
    assert emulator.stdout is not None
    urls = []
    for line in emulator.stdout:
        word, _, port = line.partition(" ")
        if word == "ready":
            urls.append(f"http://{HOST}:{port.strip()}")
        if len(urls) == count:
            return urls
    sys.exit("The emulated replicas did not start; their message is above.")


def main() -> int:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        signal.signal(number, stopped)
    port, admin_port = os.environ.get("PORT", "8080"), os.environ.get("ADMIN_PORT", "8081")
    check_free("PORT", port)
    check_free("ADMIN_PORT", admin_port)
    replicas = [url.strip() for url in os.environ.get("REPLICAS", "").split(",") if url.strip()]
    emulator = router = None
    try:
        if not replicas:
            emulator = emulator_process(EMULATED)
            replicas = urls_of(emulator, EMULATED)
            print(f"{EMULATED} emulated SGLang replicas: {' '.join(replicas)}", flush=True)
        command = [sys.executable, "-m", "router.cli", "serve", "--host", HOST, "--port", port]
        command += ["--admin-port", admin_port, "--policy", os.environ.get("POLICY", "session_affinity")]
        for url in replicas:
            command += ["--replica", url]
        welcome(port, admin_port)
        # A session of its own: a terminal's Ctrl-C reaches the router once, from here, and lets its streams end.
        router = subprocess.Popen(command, start_new_session=True)
        for number in signals:
            signal.signal(number, lambda received, _frame: router.send_signal(received))
        return router.wait()
    except _Stopped:
        return 130
    finally:
        if router is not None and router.poll() is None:
            router.terminate()
            router.wait()
        if emulator is not None:
            emulator.send_signal(signal.SIGINT)  # at once; SIGTERM would make the replicas drain as engines do
            emulator.wait()


def welcome(port: str, admin_port: str) -> None:
    print(f"warmroute on http://{HOST}:{port}, admin on http://{HOST}:{admin_port} (Ctrl-C stops it). Try:\n")
    print(f"  curl -N http://{HOST}:{port}/v1/chat/completions -H 'content-type: application/json' \\")
    print("    -H 'x-session-affinity: my-session' \\")
    print("""    -d '{"model": "emulated", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'\n""")
    print("Repeat it: the session stays on its replica. An agent's base URL is that address with /v1 (OpenAI style) or")
    print(f"without (Anthropic style). What it sees: curl http://{HOST}:{admin_port}/replicas\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
