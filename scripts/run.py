"""What `make run` does: warmroute in front of three emulated replicas, or of the real ones in REPLICAS.

Environment: REPLICAS (comma-separated URLs), HOST (127.0.0.1), PORT (8080), ADMIN_PORT (8081),
POLICY (session_affinity).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

EMULATED = 3


def emulate(count: int) -> tuple[subprocess.Popen[str], list[str]]:
    """Start emulated replicas on free ports. Returns the process and their URLs."""
    command = [sys.executable, "-m", "sim.emulator", *["--port", "0"] * count, "--default-include-usage"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    urls = []
    for line in process.stdout:
        word, _, port = line.partition(" ")
        if word == "ready":
            urls.append(f"http://127.0.0.1:{port.strip()}")
        if len(urls) == count:
            return process, urls
    sys.exit("The emulated replicas did not start; their message is above.")


def main() -> int:
    host, port = os.environ.get("HOST", "127.0.0.1"), os.environ.get("PORT", "8080")
    admin_port = os.environ.get("ADMIN_PORT", "8081")
    replicas = [url.strip() for url in os.environ.get("REPLICAS", "").split(",") if url.strip()]
    emulator = None
    if not replicas:
        emulator, replicas = emulate(EMULATED)
        print(f"{EMULATED} emulated SGLang replicas: {' '.join(replicas)}", flush=True)
    command = [sys.executable, "-m", "router.cli", "serve", "--host", host, "--port", port, "--admin-port", admin_port]
    command += ["--policy", os.environ.get("POLICY", "session_affinity")]
    for url in replicas:
        command += ["--replica", url]
    print(f"warmroute on http://{host}:{port}, admin on http://127.0.0.1:{admin_port} (Ctrl-C stops it). Try:\n")
    print(f"  curl -N http://{host}:{port}/v1/chat/completions -H 'content-type: application/json' \\")
    print("    -H 'x-session-affinity: my-session' \\")
    print("""    -d '{"model": "emulated", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'\n""")
    print("Repeat it: the session stays on its replica. An agent's base URL is that address with /v1 (OpenAI style) or")
    print(f"without (Anthropic style). What it sees: curl http://127.0.0.1:{admin_port}/replicas\n", flush=True)
    router = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: router.send_signal(received))
    try:
        return router.wait()
    finally:
        if emulator is not None:
            emulator.send_signal(signal.SIGINT)  # at once; SIGTERM would make the replicas drain as engines do
            emulator.wait()


if __name__ == "__main__":
    sys.exit(main())
