"""`rendezvous` against its origin, written out anew: the score -w / ln(h) of Schindelhauer and Schomaker 2005.

The formula below goes over all candidates and takes every logarithm, in 50 decimal digits; ours takes few, in floats.
Without weights it is Thaler and Ravishankar's highest random weight of 1998. The published properties are those of
the papers and of vLLM's router, which measured the spread of 512 sessions a replica (its pull request 128): its
coefficient of variation was 0.043, as of a random placement, where a ring of 160 points had 0.084.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal, localcontext
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64

from policies.registry import make
from policies.types import Replica, Request


def _formula(key: bytes, weights: dict[str, float]) -> str:
    def score(replica_id: str, weight: float) -> Decimal:
        digest = xxh3_64(key)
        digest.update(b"\0")
        digest.update(replica_id.encode())
        unit = (Decimal(digest.intdigest()) + Decimal("0.5")) / 2**64
        return -Decimal(weight) / unit.ln()

    with localcontext(prec=50):
        return max((score(i, w), i) for i, w in weights.items() if w > 0)[1]


@given(
    st.binary(max_size=20),
    st.dictionaries(
        st.text("abcdef:/.0123", min_size=1, max_size=10),
        st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]) | st.floats(1e-3, 1e3),
        min_size=1,
        max_size=8,
    ).filter(lambda weights: any(weights.values())),
)
def test_every_key_is_placed_as_the_formula_says(key: bytes, weights: dict[str, float]) -> None:
    candidates = [Replica(i, weight=w) for i, w in weights.items()]
    assert make("rendezvous").pick(Request(key=key), candidates, 0.0).replica.id == _formula(key, weights)


def _homes(policy: str, weights: dict[str, float], sessions: int) -> Counter[str]:
    chosen, candidates = make(policy), tuple(Replica(i, weight=w) for i, w in weights.items())
    return Counter(chosen.pick(Request(key=b"session %d" % n), candidates, 0.0).replica.id for n in range(sessions))


def test_it_spreads_like_chance_and_a_ring_less_evenly() -> None:
    """vLLM router's figures, here over 32 replicas: 0.043 and 0.084."""

    def variation(policy: str) -> float:
        counts = _homes(policy, {f"http://10.0.0.{n}:30000": 1.0 for n in range(32)}, 32 * 512).values()
        return pstdev(counts) / 512

    assert variation("rendezvous") == pytest.approx(0.043, abs=0.012)
    assert variation("consistent_hash") == pytest.approx(0.084, abs=0.02)


def test_shares_are_exactly_as_the_weights_whatever_their_ratio() -> None:
    """To within chance: four standard deviations of a binomial."""
    weights = {"a": 0.1, "b": 1.0, "c": 2.5, "d": 10.0}
    sessions = 20_000
    homes = _homes("rendezvous", weights, sessions)
    for replica_id, weight in weights.items():
        share = weight / sum(weights.values())
        assert homes[replica_id] == pytest.approx(share * sessions, abs=4 * (sessions * share * (1 - share)) ** 0.5)
