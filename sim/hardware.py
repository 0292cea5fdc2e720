"""How long a replica's GPUs take for a prefill chunk and for a decode step.

Source of every number: the tables in `sim/data/aic_kimi_b200` (see its SOURCE.md), which are predictions of NVIDIA
AIConfigurator 0.12 from measured operator tables, not measurements of a server.

How near this is to the tables: prefill is fitted to the 36 points each that one pass can hold, on average within
6.5 % (INT4 on B200) and 2 % (others), at worst 19 % and 8 % too fast, at 512 tokens on an empty cache; from 2,048
tokens in a pass within 11 %. Decode is the table at its points; a column of contexts that is left out is found again
within 7 % by those beside it.

How near the tables are to servers: fifteen published measurements of this model (InferenceX, 2026-05-19, vLLM 0.21, 8k
tokens in, 1k out, 4 to 64 at once; ten on B200, five on H200) are met within 15 % each, those on B200 within 7 % on
average. At 100k-token contexts nothing was found to check the times with.
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import inf
from typing import Final

CHUNK_TOKENS: Final = 8192
"""Prompt tokens in one prefill pass, the chunk of the study the constants come from."""

ACCEPT_LENGTH: Final = 2.3
"""Tokens a speculative verify step yields: Kimi K2.6 EAGLE3 on long multi-turn prompts (measured: 2.29, mean of
all prompts 2.49). The decode table is without speculation, so its step time is divided by this."""

Row = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Key:
    """Selects one configuration of the tables."""

    model: str
    system: str
    tp: int
    kv_dtype: str


_INT4 = "moonshotai/Kimi-K2.5"
_NVFP4 = "nvidia/Kimi-K2.6-NVFP4"
TABLES = {
    "kimi-int4-tp4-bf16": Key(_INT4, "b200_sxm", 4, "bfloat16"),
    "kimi-int4-tp4-fp8": Key(_INT4, "b200_sxm", 4, "fp8"),
    "kimi-int4-tp8-bf16": Key(_INT4, "b200_sxm", 8, "bfloat16"),
    "kimi-int4-tp8-fp8": Key(_INT4, "b200_sxm", 8, "fp8"),
    "kimi-nvfp4-tp4-bf16": Key(_NVFP4, "b200_sxm", 4, "bfloat16"),
    "kimi-nvfp4-tp4-fp8": Key(_NVFP4, "b200_sxm", 4, "fp8"),
    "kimi-nvfp4-tp8-bf16": Key(_NVFP4, "b200_sxm", 8, "bfloat16"),
    "kimi-nvfp4-tp8-fp8": Key(_NVFP4, "b200_sxm", 8, "fp8"),
    "kimi-int4-tp8-bf16-h200": Key(_INT4, "h200_sxm", 8, "bfloat16"),
}
"""By name."""
DEFAULT_TABLE = "kimi-int4-tp4-bf16"


@dataclass(frozen=True, slots=True)
class Prefill:
    """Time of one prefill pass, fitted: `a + b n + c n p + d n^2 / 2` seconds for n new tokens on p cached ones.

    The third term is attention of the new tokens over the cached ones. The fourth is their attention over each other,
    less what larger passes gain by reading the weights of their experts once: it can be negative.
    """

    a: float
    b: float
    c: float
    d: float

    def chunk_seconds(self, new_tokens: int, prefix_tokens: int) -> float:
        """One pass over at most `CHUNK_TOKENS` new tokens."""
        n = new_tokens
        return self.a + n * (self.b + self.c * prefix_tokens + self.d * n / 2)

    def seconds(self, new_tokens: int, prefix_tokens: int) -> float:
        """All passes of a prompt whose first `prefix_tokens` are resident; 0 when nothing is new."""
        total = 0.0
        start, end = prefix_tokens, prefix_tokens + new_tokens
        while start < end:
            total += self.chunk_seconds(min(CHUNK_TOKENS, end - start), start)
            start += CHUNK_TOKENS
        return total

    def slowed(self, factor: float) -> Prefill:
        """Times `factor` times as long."""
        return Prefill(*(factor * term for term in (self.a, self.b, self.c, self.d)))


class Decode:
    """Time of one decode step: the table, interpolated linearly in batch and in mean context.

    Outside the table the nearest two columns are continued, except below its shortest context, where the time of the
    shortest is kept: a step has a floor that does not come from the context.
    """

    __slots__ = ("_batches", "_contexts", "_seconds")

    def __init__(self, contexts: Sequence[float], batches: Sequence[float], seconds: Sequence[Sequence[float]]) -> None:
        """`seconds[i][j]` belongs to `contexts[i]` (tokens) and `batches[j]` (requests), both ascending."""
        self._contexts = list(contexts)
        self._batches = list(batches)
        self._seconds = [list(row) for row in seconds]

    def slowed(self, factor: float) -> Decode:
        """A table of times `factor` times as long."""
        seconds = [[factor * value for value in row] for row in self._seconds]
        return Decode(self._contexts, self._batches, seconds)

    def step_seconds(self, batch: int, context_tokens: float) -> float:
        """One step of `batch` requests with `context_tokens` tokens each on average."""
        return self.line(batch, context_tokens)[0]

    def line(self, batch: int, context_tokens: float) -> tuple[float, float, float]:
        """The piece of the table around a mean context: it is straight in it.

        Returns the step's seconds, the seconds that each further token of mean context adds, and the context up to
        which that holds.
        """
        contexts, batches = self._contexts, self._batches
        j = min(max(bisect_right(batches, batch) - 1, 0), len(batches) - 2)
        v = (batch - batches[j]) / (batches[j + 1] - batches[j])
        if context_tokens < contexts[0]:
            shortest = self._seconds[0]
            return (1 - v) * shortest[j] + v * shortest[j + 1], 0.0, contexts[0]
        i = min(bisect_right(contexts, context_tokens) - 1, len(contexts) - 2)
        low, high = self._seconds[i], self._seconds[i + 1]
        start = (1 - v) * low[j] + v * low[j + 1]
        slope = ((1 - v) * high[j] + v * high[j + 1] - start) / (contexts[i + 1] - contexts[i])
        end = contexts[i + 1] if i < len(contexts) - 2 else inf
        return start + slope * (context_tokens - contexts[i]), slope, end


@dataclass(frozen=True, slots=True)
class Hardware:
    """Times of one replica, in seconds."""

    prefill: Prefill
    decode: Decode
    accept_length: float = ACCEPT_LENGTH

    def prefill_seconds(self, new_tokens: int, prefix_tokens: int) -> float:
        """One prefill pass; `new_tokens` is at most `CHUNK_TOKENS`."""
        return self.prefill.chunk_seconds(new_tokens, prefix_tokens)

    def token_seconds(self, batch: int, context_tokens: float) -> float:
        """Time between two tokens of each request in a decode batch, speculation included."""
        return self.decode.step_seconds(batch, context_tokens) / self.accept_length

    def token_line(self, batch: int, context_tokens: float) -> tuple[float, float, float]:
        """`Decode.line` of the time between two tokens of each request."""
        seconds, slope, end = self.decode.line(batch, context_tokens)
        return seconds / self.accept_length, slope / self.accept_length, end

    def slowed(self, factor: float) -> Hardware:
        """Hardware that takes `factor` times as long for everything."""
        return Hardware(self.prefill.slowed(factor), self.decode.slowed(factor), self.accept_length)


@cache
def load(name: str = DEFAULT_TABLE) -> Hardware:
    """The times of one of the tables; ValueError names those there are."""
    key = TABLES.get(name)
    if key is None:
        raise ValueError(f"no hardware table {name!r}; known: {', '.join(TABLES)}")
    # Longer rows than a pass can hold would pull the fit away from the passes there are.
    passes = [row for row in prefill_rows(key) if row[0] <= CHUNK_TOKENS]
    return Hardware(fit_prefill(passes), decode_table(decode_rows(key)))


def prefill_rows(key: Key) -> list[Row]:
    """(new tokens, prefix tokens, seconds) of the table."""
    return _rows("prefill_latency.csv.gz", key, "new_tokens", "prefix_tokens", "prefill_ms")


def decode_rows(key: Key) -> list[Row]:
    """(context tokens, batch, seconds) of the table, without speculation."""
    return _rows("decode_latency.csv.gz", key, "context_tokens", "batch", "decode_step_ms")


def fit_prefill(rows: Iterable[Row]) -> Prefill:
    """Least squares of the relative error over rows of (new tokens, prefix tokens, seconds).

    Of the relative error, so that the short prefills of a resident session count as much as cold ones.
    """
    normal = [[0.0] * 5 for _ in range(4)]
    for n, p, seconds in rows:
        terms = [1 / seconds, n / seconds, n * p / seconds, n * n / 2 / seconds, 1.0]
        for i in range(4):
            for j in range(5):
                normal[i][j] += terms[i] * terms[j]
    return Prefill(*_solve(normal))


def decode_table(rows: Sequence[Row]) -> Decode:
    """The grid of rows of (context tokens, batch, seconds)."""
    contexts = sorted({row[0] for row in rows})
    batches = sorted({row[1] for row in rows})
    seconds = {(context, batch): value for context, batch, value in rows}
    return Decode(contexts, batches, [[seconds[context, batch] for batch in batches] for context in contexts])


def _rows(name: str, key: Key, x: str, y: str, milliseconds: str) -> list[Row]:
    wanted = (key.model, key.system, str(key.tp), key.kv_dtype)
    packed = resources.files("sim").joinpath("data", "aic_kimi_b200", name).read_bytes()
    table = csv.DictReader(gzip.decompress(packed).decode().splitlines())
    return [
        (float(row[x]), float(row[y]), float(row[milliseconds]) / 1000)
        for row in table
        if (row["model"], row["system"], row["tp"], row["kv_dtype"]) == wanted
    ]


def _solve(augmented: list[list[float]]) -> list[float]:
    """Gauss-Jordan elimination with partial pivoting; the last column is the right-hand side."""
    size = len(augmented)
    # The columns differ by ten orders of magnitude (1 against n * p): scaled to their diagonal first.
    scale = [augmented[i][i] ** 0.5 for i in range(size)]
    rows = [
        [value / scale[i] / (scale[j] if j < size else 1.0) for j, value in enumerate(row)]
        for i, row in enumerate(augmented)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for i in range(size):
            if i != column:
                factor = rows[i][column]
                rows[i] = [value - factor * top for value, top in zip(rows[i], rows[column], strict=True)]
    return [rows[i][size] / scale[i] for i in range(size)]
