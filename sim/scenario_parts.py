"""The tables of a scenario that are its own, besides its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sim.events import Seconds
from sim.fleet import Role
from sim.prefix_cache import HostWrite

Count = Annotated[int, Field(ge=1)]

MOST_REPLICAS = 10_000
"""Of a group. Beyond it a run takes hours."""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal replicas of a fleet."""

    machine: str
    """Of `sim.machine.MACHINES`."""
    count: Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
    name: str = "r"
    """Its replicas' names begin with it, and events name it."""
    role: Role = Role.UNIFIED
    host_tier: bool = True
    host_write: HostWrite = HostWrite.WRITE_THROUGH
    kv_tokens: Count | None = None
    """In GPU memory, as SGLang prints at its start (`max_total_num_tokens`); None: the machine's own."""
    accept_length: Annotated[float, Field(ge=1.0)] | None = None
    """Tokens that a step of speculative decoding yields; None: the machine's own."""
    mixed_chunk: bool = False
    """Decode beside prefill; not with speculative decoding (an accept length of 1 is none)."""


@dataclass(frozen=True, slots=True)
class Network:
    """What is between replicas, and between them and the routers."""

    report_interval_s: Annotated[float, Field(ge=0.01)] = 1.0
    report_delay_s: Seconds = 0.05
    link_bytes_per_s: Annotated[float, Field(gt=0.0)] = 50e9
    """Over which a replica sends KV to another."""
    kv_bytes_per_token: Annotated[float, Field(gt=0.0)] = 70_272.0
    """Of that KV; Kimi K2's in BF16, half as much in FP8."""


Play = Literal["open", "closed", "again"]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace to be played: see `sim.traces`."""

    path: str
    """A relative one of a scenario's file is beside that file."""
    format: str | None = None
    """None: told by its first line."""
    play: Play = "open"
    """Each request at its time; each session at its time, and its requests one after the answer to the other; or
    sessions again and again, as many at a time as the load says."""
    speed: Annotated[float, Field(gt=0.0)] = 1.0
    """Of the trace's times; without effect when sessions are played again and again."""
