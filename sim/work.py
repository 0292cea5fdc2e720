"""The plain values of a replica: what it can hold, a request and how far it has come, counters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sim.prefix_cache import HostWrite, Node


class QueueFull(Exception):
    """The waiting queue is at its limit; the request was not taken."""


class Stage(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica can hold, and how it schedules."""

    kv_tokens: int
    page_size: int = 16
    max_running: int = 256
    max_queued: int | None = None
    """Requests that may wait beyond those that have a slot in the running batch; None is no limit, SGLang's default."""
    host_tokens: int = 0
    """KV tokens of a host tier; 0 is none, else at least `kv_tokens` if everything is written through to it."""
    load_back_tokens_per_s: float = 700_000.0
    """From the host tier to the GPU."""
    host_write: HostWrite = HostWrite.WRITE_THROUGH
    mixed_chunk: bool = False
    """Decode beside each prefill chunk, in one pass: SGLang's `--enable-mixed-chunk`. Else decoding rests meanwhile."""
    schedule_conservativeness: float = 1.0
    """SGLang's option of that name: how much KV is kept back for answers under way; see `NewTokenRatio`."""


class Work:
    """A request and how far it has come. Times are those of the caller's clock; None until it happened.

    No dataclass, nor are the others of which each request makes one: compiled, those are made by Python.
    """

    def __init__(
        self,
        pages: list[int],
        prompt_tokens: int,
        output_tokens: int,
        max_new_tokens: int = 0,
        *,
        transferred: bool = False,
    ) -> None:
        self.pages = pages
        """Chained hashes of the full pages of prompt and output, without the last output token, whose KV is never
        computed. May end with the prompt's when the output is not to be reused."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Tokens it will produce, at least 1."""
        self.max_new_tokens = max(max_new_tokens, output_tokens)
        """The most it may produce, as its client said: all that the scheduler knows. At least `output_tokens`."""
        self.transferred = transferred
        """The prompt's KV, and the first output token, come with it from another replica: nothing is to be computed."""
        self.arrived = 0.0
        self.stage = Stage.WAITING
        self.cached_tokens = 0
        """Prompt tokens found in either tier when it was first admitted."""
        self.host_tokens = 0
        """Of those, the ones that were only in the host tier."""
        self.prefilled_tokens = 0
        """Tokens whose KV is there after prefill or was there before it: the prompt's, and once it was retracted also
        those of its output until then."""
        self.produced = 0
        """Output tokens so far."""
        self.recomputed = 0
        """Output tokens that it had produced when it was last retracted, and that prefill computes like a prompt's."""
        self.started: float | None = None
        """When its prefill first began."""
        self.first_token: float | None = None
        self.finished: float | None = None
        self.loading_tokens = 0
        """Still to be loaded from the host tier, before the next chunk."""
        self.node: Node | None = None
        """The last node of the tree that it holds pinned; while it runs."""
        self.pages_held = 0
        """Pages allocated for it outside the tree."""
        self.room = 0
        """Tokens until its pages are full, counting as taken the slot of the token produced last; in decode."""

    @property
    def fill_tokens(self) -> int:
        """Tokens that must have KV before the next one can be produced."""
        return self.prompt_tokens + self.recomputed

    @property
    def context_tokens(self) -> int:
        """Tokens of KV it holds."""
        return self.prefilled_tokens + self.produced - self.recomputed


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    retracted: int = 0
    """Times that a request was taken out of the batch for want of KV."""
    prompt_tokens: int = 0
    """Of all prompts whose prefill began here."""
    cached_tokens: int = 0
    host_tokens: int = 0
    output_tokens: int = 0
    transferred_tokens: int = 0
    """Prompt tokens whose KV came from another replica."""
    prefill_tokens: int = 0
    """Tokens computed in prefill."""
    refill_tokens: int = 0
    """Of those, the ones of retracted requests, which had been computed before."""
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_batch: int = 0
    """Sum of batch sizes over the decode steps; the sums below are of the same steps."""
    decode_batch_squared: int = 0
    decode_seconds: float = 0.0
    decode_batch_seconds: float = 0.0
