"""Published vectors of the hash, and what rendezvous order promises: evenness, weights, few moves."""

from __future__ import annotations

from collections import Counter
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from policies.hashing import rendezvous, score, uniform
from policies.types import Replica

KEYS = [f"session-{n}".encode() for n in range(8_000)]

CHI_SQUARE_999 = {2: 13.82, 7: 24.32}
"""0.999 quantiles by degrees of freedom, from the usual tables. The keys are fixed, so the verdict is too."""


def _fleet(*weights: float) -> list[Replica]:
    return [Replica(f"http://10.0.0.{n}:30000", weight=w) for n, w in enumerate(weights)]


def _chi_square(homes: Counter[str], fleet: list[Replica]) -> float:
    total, weight = sum(homes.values()), sum(r.weight for r in fleet)
    return sum((homes[r.id] - (share := total * r.weight / weight)) ** 2 / share for r in fleet)


# The hash


def _sanity_buffer(length: int) -> bytes:
    """The input of xxHash's own sanity check: the top bytes of a product that grows by PRIME64."""
    out, state = bytearray(), 2654435761
    for _ in range(length):
        out.append(state >> 56)
        state = state * 11400714785074694797 % 2**64
    return bytes(out)


@pytest.mark.parametrize(
    ("length", "digest"),
    [
        (0, 0x2D06800538D394C2),
        (1, 0xC44BDFF4074EECDB),
        (6, 0x27B56A84CD2D7325),
        (12, 0xA713DAF0DFBB77E7),
        (24, 0xA3FE70BF9D3510EB),
        (48, 0x397DA259ECBA1F11),
        (80, 0xBCDEFBBB2C47C90A),
        (195, 0xCD94217EE362EC3A),
        (403, 0xCDEB804D65C6DEA4),
        (512, 0x617E49599013CB6B),
        (2048, 0xDD59E2C3A5F038E0),
        (2240, 0x6E73A90539CF2948),
        (2367, 0xCB37AEB9E5D361ED),
    ],
)
def test_xxh3_gives_the_published_digests(length: int, digest: int) -> None:
    """XXH3_64bits, seed 0, from xxHash 0.8 (`cli/xsum_sanity_check.c`): one input of each length class."""
    assert xxh3_64_intdigest(_sanity_buffer(length)) == digest


def test_uniform_is_tied_to_a_published_digest() -> None:
    """An empty key and salt leave the separator alone: one zero byte, which is the vector of length 1 above.

    Routers of different builds agree only while this holds.
    """
    assert uniform(b"", "") == ((0xC44BDFF4074EECDB >> 12) + 0.5) / 2**52
    assert uniform(b"key", "salt") == ((xxh3_64_intdigest(b"key\x00salt") >> 12) + 0.5) / 2**52


@pytest.mark.parametrize(
    ("key", "salt"), [("9a2cb9d02924", "o"), ("4d80d722cfdf", "("), ("a7040a2aedcf82", ""), ("3d1cfd079c9ce9", "")]
)
def test_uniform_stays_below_one_for_the_largest_digests(key: str, salt: str) -> None:
    """Inputs whose digest begins with 53 ones, found by inverting XXH3 (a bijection on 8 bytes).

    Rounded up to 1.0, they would divide by log(1) = 0.
    """
    digest = xxh3_64_intdigest(bytes.fromhex(key) + b"\x00" + salt.encode())
    assert digest >> 11 == 2**53 - 1
    assert uniform(bytes.fromhex(key), salt) < 1.0
    assert 0.0 < score(bytes.fromhex(key), Replica(salt)) < inf


@given(st.binary(max_size=40), st.text(max_size=20).filter(lambda s: s.isprintable()))
def test_uniform_lies_strictly_between_zero_and_one(key: bytes, salt: str) -> None:
    assert 0.0 < uniform(key, salt) < 1.0


def test_score_is_the_published_formula() -> None:
    """-w / ln(u): Schindelhauer & Schomaker 2005."""
    replica = Replica("a", weight=3.0)
    assert score(b"k", replica) == pytest.approx(-3.0 / log(uniform(b"k", "a")))


# Rendezvous order


def test_equal_replicas_get_equal_shares() -> None:
    fleet = _fleet(*[1.0] * 8)
    homes = Counter(rendezvous(k, fleet).id for k in KEYS)
    assert _chi_square(homes, fleet) < CHI_SQUARE_999[7]


def test_shares_are_proportional_to_weights() -> None:
    fleet = _fleet(1.0, 2.0, 5.0)
    homes = Counter(rendezvous(k, fleet).id for k in KEYS)
    assert _chi_square(homes, fleet) < CHI_SQUARE_999[2]


def test_a_scaled_fleet_shares_alike() -> None:
    """Only ratios of weights matter."""
    light, heavy = _fleet(1.0, 2.0, 5.0), _fleet(100.0, 200.0, 500.0)
    assert [rendezvous(k, light).id for k in KEYS[:500]] == [rendezvous(k, heavy).id for k in KEYS[:500]]


def test_when_a_replica_leaves_only_its_keys_move() -> None:
    fleet = _fleet(*[1.0] * 8)
    gone = fleet[3]
    before = {k: rendezvous(k, fleet) for k in KEYS}
    rest = [r for r in fleet if r is not gone]
    orphans = 0
    for key, home in before.items():
        if home is gone:
            orphans += 1
        else:
            assert rendezvous(key, rest) is home
    assert orphans > 0
    heirs = Counter(rendezvous(k, rest).id for k, home in before.items() if home is gone)
    assert len(heirs) == len(rest), "the keys of a lost replica spread over all that are left"


def test_when_a_replica_joins_keys_move_only_to_it() -> None:
    fleet = _fleet(*[1.0] * 8)
    newcomer = Replica("http://10.0.0.99:30000")
    moved = 0
    for key in KEYS:
        home, now = rendezvous(key, fleet), rendezvous(key, [*fleet, newcomer])
        if now is not home:
            moved += 1
            assert now is newcomer
    assert len(KEYS) / 9 * 0.85 < moved < len(KEYS) / 9 * 1.15


def test_a_raised_weight_only_draws_keys_in() -> None:
    fleet, raised = _fleet(1.0, 1.0, 1.0), _fleet(1.0, 2.0, 1.0)
    moves = [(a, b) for k in KEYS if (a := rendezvous(k, fleet).id) != (b := rendezvous(k, raised).id)]
    assert moves
    assert {b for _, b in moves} == {raised[1].id}


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_replica_without_weight_is_never_chosen_over_another(weight: float) -> None:
    fleet = _fleet(weight, 1e-6, weight)
    assert {rendezvous(k, fleet).id for k in KEYS} == {fleet[1].id}


def test_a_fleet_without_any_weight_is_still_shared_evenly() -> None:
    fleet = _fleet(*[0.0] * 8)
    homes = Counter(rendezvous(k, fleet).id for k in KEYS)
    assert _chi_square(homes, _fleet(*[1.0] * 8)) < CHI_SQUARE_999[7]


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        rendezvous(b"k", [])


@given(
    st.binary(max_size=32),
    st.dictionaries(st.text("abc:/.019", max_size=12), st.floats(0, 1e9), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_the_order_of_candidates_does_not_matter(key: bytes, weights: dict[str, float], random: object) -> None:
    fleet = [Replica(i, weight=w) for i, w in weights.items()]
    winner = rendezvous(key, fleet)
    random.shuffle(fleet)  # type: ignore[attr-defined]
    assert rendezvous(key, fleet) is winner
    for other in fleet:
        if other is not winner:
            assert rendezvous(key, [r for r in fleet if r is not other]) is winner
