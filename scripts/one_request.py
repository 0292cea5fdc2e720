"""The main job of an installed warmroute, done once: a request through a router before an emulated replica.

Run by the Python of the environment that holds it, as `/opt/warmroute/bin/python scripts/one_request.py`. Nothing of
the checkout is used but this file. Prints one line; exits with 1 and says why when the job is not done.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib.util import find_spec
from pathlib import Path

LIMIT_S = 120
"""For all of it. It takes about two seconds, on a machine with nothing else to do."""


def started(stack: ExitStack, *command: str) -> subprocess.Popen[str]:
    """A process that is gone when the stack is, or when the limit has passed."""
    process = subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    stack.callback(timer.cancel)
    return process


def told(process: subprocess.Popen[str], pattern: str) -> tuple[str, ...]:
    """The groups of the first line that matches, waited for."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found.groups()
        lines.append(line)
    sys.exit(f"{process.args!r} ended before it said {pattern!r}:\n{''.join(lines)}")


def asked(port: str, method: str, path: str, body: object = None) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", int(port), timeout=LIMIT_S)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse()


def ready(admin_port: str) -> bool:
    """Whether requests may come. It says where it listens a moment before it does."""
    try:
        return asked(admin_port, "GET", "/readyz").status == 200
    except ConnectionRefusedError:
        return False


def main() -> None:
    spec = find_spec("router")
    if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(sys.prefix):
        sys.exit(f"warmroute is not installed in {sys.prefix}")
    command = str(Path(sys.prefix) / "bin/warmroute")
    version = subprocess.run([command, "--version"], cwd="/", capture_output=True, text=True, check=True).stdout.strip()
    with ExitStack() as stack:
        emulator = started(stack, sys.executable, "-P", "-m", "sim.emulator", "--port", "0")
        (replica,) = told(emulator, r"^ready (\d+)$")
        router = started(
            stack, command, "serve", "--port", "0", "--admin-port", "0", "--replica", f"http://127.0.0.1:{replica}"
        )
        port, admin_port = told(router, r"listens on http://127\.0\.0\.1:(\d+), admin on http://127\.0\.0\.1:(\d+)")
        end = time.monotonic() + LIMIT_S
        while not ready(admin_port):
            if time.monotonic() > end:
                sys.exit("the router does not become ready")
            time.sleep(0.1)
        message = {"role": "user", "content": "hello"}
        answer = asked(port, "POST", "/v1/chat/completions", {"model": "m", "stream": True, "messages": [message]})
        text = answer.read().decode()
        if answer.status != 200 or not text.rstrip().endswith("data: [DONE]"):
            sys.exit(f"answered with {answer.status}:\n{text}")
        router.terminate()
        if code := router.wait(LIMIT_S):
            sys.exit(f"the router ended with {code}")
    print(f"{version}, installed in {sys.prefix}: a streamed request was answered, {len(text)} characters")


if __name__ == "__main__":
    try:
        main()
    except (OSError, HTTPException, subprocess.SubprocessError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
