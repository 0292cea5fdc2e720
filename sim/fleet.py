"""The replicas of a world: groups of equal ones, and the way they are watched and connected."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sim.hardware import Hardware
from sim.work import Limits


class Role(StrEnum):
    """What the replicas of a group are for."""

    UNIFIED = "unified"
    """Prefill and decode. The policy picks them."""
    PREFILL = "prefill"
    """The policy picks them; the KV of a prompt then goes to the decode replica with the fewest tokens."""
    DECODE = "decode"
    """They decode what prefill or warm replicas send. No prefix cache, which is SGLang's default for them."""
    WARM = "warm"
    """The policy picks them; a prompt of which too much would be new there is computed on a cold replica. They decode,
    too, unless there are replicas for that."""
    COLD = "cold"
    """They compute long new prompts, whose KV goes to the warm replica that the policy picked: cache-aware
    disaggregation, in which cold prefills do not stand in the way of warm ones (Together AI, "CPD")."""


PICKED = frozenset((Role.UNIFIED, Role.PREFILL, Role.WARM))
"""Roles of the replicas that a router chooses among."""

_TOGETHER = (
    frozenset((Role.UNIFIED,)),
    frozenset((Role.PREFILL, Role.DECODE)),
    frozenset((Role.WARM, Role.COLD)),
    frozenset((Role.WARM, Role.COLD, Role.DECODE)),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Equal replicas."""

    count: int
    hardware: Hardware
    limits: Limits
    name: str = "r"
    """Its replicas' names begin with it."""
    role: Role = Role.UNIFIED


@dataclass(frozen=True, slots=True)
class Fleet:
    """All groups. Raises ValueError when they do not go together."""

    groups: tuple[Group, ...]
    report_interval_s: float = 1.0
    report_delay_s: float = 0.05
    """From the taking of the numbers until the router has them."""
    link_bytes_per_s: float = 50e9
    """Of each replica that sends KV to another, one prompt after the other. 50 GB/s is a 400 Gb/s network card."""
    kv_bytes_per_token: float = 70_272.0
    """That are sent of each token: one rank's, as every rank has a card and sends its own copy at the same time. The
    default is Kimi K2's in BF16: 61 layers * 576 elements * 2 bytes."""
    cold_tokens: int = 20_000
    """With cold and warm groups: a prompt with more expected new tokens than that is computed on a cold replica."""

    def __post_init__(self) -> None:
        roles = frozenset(group.role for group in self.groups)
        if roles not in _TOGETHER:
            raise ValueError(
                f"fleet: roles {', '.join(sorted(roles)) or 'none'}; must be unified alone, or prefill with decode, "
                "or warm with cold, with decode or without"
            )
        names = [group.name for group in self.groups]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"fleet: two groups are named {name!r}; give each a name of its own")
        if any(group.limits.page_size != self.page_size for group in self.groups):
            raise ValueError("fleet: the groups' page_size must be the same")

    @property
    def page_size(self) -> int:
        """Tokens; the same everywhere, so that a page has one name."""
        return self.groups[0].limits.page_size

    @property
    def decodes_apart(self) -> bool:
        """Whether those that the policy picks send on what they have prefilled."""
        return any(group.role is Role.DECODE for group in self.groups)

    @property
    def replicas(self) -> int:
        """At the start."""
        return sum(group.count for group in self.groups)

    @property
    def hardware(self) -> Hardware:
        """Of the first group that the policy picks from, by which ideal times are reckoned."""
        return next(group for group in self.groups if group.role in PICKED).hardware

    def group(self, name: str | None) -> Group:
        """By name; None is the first. Raises ValueError that names those there are."""
        for group in self.groups:
            if name is None or group.name == name:
                return group
        raise ValueError(f"no group {name!r}; known: {', '.join(group.name for group in self.groups)}")
