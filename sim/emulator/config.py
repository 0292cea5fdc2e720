"""What an emulated replica is started with. Names follow SGLang's flags where it has one."""

from __future__ import annotations

from dataclasses import dataclass

from sim.machine import DEFAULT_MACHINE, MACHINES, find_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorConfig:
    """Settings of one emulated replica; ValueError names the one that cannot be."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""
    model: str = "emulated"
    """The served model name. Requests may name any other, as with SGLang."""
    time_scale: float = 1.0
    """Wall-clock seconds per second of the real thing: 0.01 is a hundred times as fast."""
    hardware: str = DEFAULT_MACHINE
    """Of `MACHINES`."""
    kv_tokens: int = find_machine(DEFAULT_MACHINE).kv_tokens
    page_size: int = 16
    dp_size: int = 1
    """Data-parallel ranks: each a KV pool, a cache, a batch and a queue of its own behind the one port."""
    context_length: int = 262_144
    """Kimi K2.6's window."""
    max_running_requests: int = 256
    max_queued_requests: int | None = None
    cache_report: bool = True
    default_include_usage: bool = False
    """Streams carry the usage chunk unless the client asks otherwise."""
    response_store: bool = False
    """Responses are kept, so that they can be gone on from, asked for by id and made in the background."""
    api_key: str | None = None
    output_tokens: int = 32
    """Length at which an answer ends by itself, when `ignore_eos` is not set and `max_tokens` is not smaller."""
    disconnect_seconds: float = 0.0
    """Delay until a client that left is noticed, for non-streams and for chat and completion streams before their first
    token. The real engine polls every 4 s there; 0 frees the slot at once. Scaled by `time_scale`."""
    keep_alive_seconds: float = 5.0
    """Idle connections are closed after this; SGLang's default. Not scaled: a client's pool is not either."""

    def __post_init__(self) -> None:
        positive = ("time_scale", "kv_tokens", "page_size", "context_length", "max_running_requests", "output_tokens")
        for name in (*positive, "dp_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("max_queued_requests", "disconnect_seconds", "keep_alive_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
        if self.hardware not in MACHINES:
            raise ValueError(f"hardware must be one of {', '.join(MACHINES)}, not {self.hardware!r}")
        if self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens must hold a page of {self.page_size} tokens, not {self.kv_tokens}")
