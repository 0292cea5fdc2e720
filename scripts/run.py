"""What `make run` does: warmroute in front of three emulated replicas, or of the real ones in REPLICAS.

Environment: REPLICAS (comma-separated URLs), PORT (8080), ADMIN_PORT (8081), POLICY (session_affinity).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EMULATED = 3
HOST = "127.0.0.1"
"""Not from the environment: shells and conda set HOST for ends of their own."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl(2): the signal a process gets when its parent dies. A session of its own would outlive it."""


class _Stopped(Exception):
    """A signal came before the router ran."""


def stopped(_number: int, _frame: FrameType | None) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a second one must not break off the clearing away
    raise _Stopped


@contextmanager
def heeding() -> Iterator[None]:
    """Signals are heeded within, where we wait, and held back elsewhere: one that came as a child is made would run our
    handler there, and be lost, or lose us the child."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def dies_with_us(number: signal.Signals) -> Callable[[], None]:
    """For a child to call before it becomes another program: it gets the signal when this process is killed."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    parent = os.getpid()

    def prepare() -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


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
    prepare = dies_with_us(signal.SIGKILL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=prepare)


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
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, stopped)
    port, admin_port = os.environ.get("PORT", "8080"), os.environ.get("ADMIN_PORT", "8081")
    check_free("PORT", port)
    check_free("ADMIN_PORT", admin_port)
    replicas = [url.strip() for url in os.environ.get("REPLICAS", "").split(",") if url.strip()]
    emulator = checking = router = None
    try:
        if not replicas:
            emulator = emulator_process(EMULATED)
            with heeding():
                replicas = urls_of(emulator, EMULATED)
        settings = ["--host", HOST, "--port", port, "--admin-port", admin_port]
        settings += ["--policy", os.environ.get("POLICY", "session_affinity")]
        for url in replicas:
            settings += ["--replica", url]
        command = [sys.executable, "-m", "router.cli"]
        checking = subprocess.Popen(
            [*command, "check-config", *settings],
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C would end it in a traceback
            preexec_fn=dies_with_us(signal.SIGKILL),
        )
        with heeding():
            unsound = checking.wait()
        if unsound:  # it has said why, and no welcome is to stand above that
            return unsound
        if emulator is not None:
            print(f"{EMULATED} emulated SGLang replicas: {' '.join(replicas)}", flush=True)
        welcome(port, admin_port)
        # A session of its own: a terminal's Ctrl-C reaches the router once, from here, and lets its streams end.
        router = subprocess.Popen(
            [*command, "serve", *settings], start_new_session=True, preexec_fn=dies_with_us(signal.SIGTERM)
        )
        for number in SIGNALS:
            # Always SIGTERM: while Python still starts, SIGINT would end in a traceback.
            signal.signal(number, lambda _number, _frame: router.terminate())
        with heeding():
            code = router.wait()
        return code if code >= 0 else 128 - code  # ended by a signal: as shells say it
    except _Stopped:
        return 130
    finally:
        if checking is not None and checking.poll() is None:
            checking.kill()
            checking.wait()
        if router is not None and router.poll() is None:
            router.terminate()
            router.wait()
        if emulator is not None:
            emulator.kill()  # SIGTERM would make the replicas drain as engines do
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
