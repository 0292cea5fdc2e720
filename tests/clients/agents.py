"""Real coding agents, run headless and offline.

Commands and variables as measured for the pinned versions of scripts/clients/package.json. Each session has a
home of its own, so "continue the last conversation" can only mean its own, and the environment is cleaned, so
that nothing of the machine's settings (keys, proxies, other base URLs) reaches the agent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.process import ROOT

SEEDS = Path(__file__).with_name("seeds")
MODULES = ROOT / ".clients" / "node_modules"
RUN_LIMIT_S = 180
"""A turn takes 0.2 to 3 s; an agent's own retries of a failing server may add a minute."""
NOWHERE = "http://127.0.0.1:9"
"""As a proxy: nothing listens on the discard port, so what is not for loopback fails at once and stays here."""


@dataclass(frozen=True)
class Agent:
    """How one coding agent is run and what the router is expected to know it by."""

    name: str
    rule: str
    """The identity rule the router's log line must name."""
    first: tuple[str, ...]
    """Command of a session's first turn; the prompt is appended."""
    again: tuple[str, ...]
    """Command of a continued turn; the prompt is appended."""
    environment: dict[str, str] = field(default_factory=dict)
    """`@ROUTER_URL@` in a value stands for the router's address, as it does in the seed files."""


_OPENCODE = str(MODULES / "opencode-linux-x64/bin/opencode")
_CLAUDE = str(MODULES / "@anthropic-ai/claude-code-linux-x64/claude")
_CODEX = str(MODULES / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex")
_PI = (str(MODULES / ".bin/pi"), "--provider", "warmroute", "--model", "emulated")
_QWEN = (str(MODULES / ".bin/qwen"), "--auth-type", "openai")

OPENCODE = Agent(
    name="opencode",
    rule="x-session-affinity",
    first=(_OPENCODE, "run"),
    again=(_OPENCODE, "run", "-c"),
    environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
)
CODEX = Agent(
    name="codex",
    rule="session-id",
    first=(_CODEX, "exec", "--skip-git-repo-check"),
    again=(_CODEX, "exec", "--skip-git-repo-check", "resume", "--last"),
    environment={"OPENAI_API_KEY": "unused"},
)
CLAUDE = Agent(
    name="claude",
    rule="x-claude-code-session-id",
    first=(_CLAUDE, "-p"),
    again=(_CLAUDE, "-c", "-p"),
    environment={
        "ANTHROPIC_BASE_URL": "@ROUTER_URL@",
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_MODEL": "emulated",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
)
PI = Agent(
    name="pi",
    rule="x-session-affinity",
    first=(*_PI, "-p"),
    again=(*_PI, "-c", "-p"),
)
QWEN = Agent(
    name="qwen",
    rule="fingerprint",
    first=(*_QWEN, "-p"),
    again=(*_QWEN, "-c", "-p"),
    environment={
        "OPENAI_BASE_URL": "@ROUTER_URL@/v1",
        "OPENAI_API_KEY": "unused",
        "OPENAI_MODEL": "emulated",
    },
)
AGENTS = (OPENCODE, CODEX, CLAUDE, PI, QWEN)


class Session:
    """One conversation with one agent, in a fresh home, against one router."""

    def __init__(self, agent: Agent, home: Path, router_url: str) -> None:
        self.agent = agent
        self._turns = 0
        self._work = home / "work"
        temporary = home / "tmp"
        for folder in (self._work, temporary):
            folder.mkdir(parents=True)
        seed = SEEDS / agent.name
        if seed.is_dir():
            shutil.copytree(seed, home, dirs_exist_ok=True)
            for path in (path for path in home.rglob("*") if path.is_file()):
                path.write_text(path.read_text().replace("@ROUTER_URL@", router_url))
        self._environment = {
            "HOME": str(home),
            "PATH": os.pathsep.join((str(MODULES / ".bin"), "/usr/bin", "/bin")),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "TMPDIR": str(temporary),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            **{name: value.replace("@ROUTER_URL@", router_url) for name, value in agent.environment.items()},
        }

    def turn(self, prompt: str) -> str:
        """Run one turn and return what the agent printed. AssertionError when it does not exit with 0."""
        command = self.agent.again if self._turns else self.agent.first
        self._turns += 1
        done = subprocess.run(
            (*command, prompt),
            cwd=self._work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, (
            f"{self.agent.name} exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
        return done.stdout
