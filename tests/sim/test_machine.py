"""What fits on a replica, against what has been published and reckoned elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim import hardware
from sim.machine import (
    B200,
    B200_NOMINAL,
    DFLASH,
    DFLASH_TUNED,
    EAGLE3,
    H200,
    KIMI,
    MACHINES,
    NO_SPECULATION,
    Memory,
    find_machine,
    vary,
)

BARE = Memory(KIMI, "int4", B200_NOMINAL, 4, "bfloat16", fraction=1.0)
"""The sum that public claims do: 720 GB less 595 GB of weights, and nothing for anything else."""


def test_the_published_capacity_of_four_b200() -> None:
    """125 GB left, about 450k tokens in BF16, four sessions of 100k (claims.md, row 4); FP8 twice that (row 6)."""
    left = 4 * BARE.gpu.hbm_bytes - KIMI.weight_bytes["int4"]
    assert left == 125 * 10**9
    assert BARE.kv_tokens == pytest.approx(450_000, rel=0.02)
    assert BARE.kv_tokens // 100_000 == 4
    assert replace(BARE, kv_dtype="fp8").kv_tokens == pytest.approx(2 * BARE.kv_tokens, rel=0.005)


def test_the_published_capacity_of_eight_b200() -> None:
    """845 GB left, "about 3M tokens": true of FP8, and 1.5M in BF16 (workloads.md, C1)."""
    eight = replace(BARE, tp=8)
    assert 8 * eight.gpu.hbm_bytes - KIMI.weight_bytes["int4"] == 845 * 10**9
    assert eight.kv_tokens == pytest.approx(1_500_000, rel=0.01)
    assert replace(eight, kv_dtype="fp8").kv_tokens == pytest.approx(3_000_000, rel=0.01)


@pytest.mark.parametrize(
    ("tp", "kv_dtype", "fraction", "thousands"),
    [
        (4, "bfloat16", 1.00, 619),
        (4, "bfloat16", 0.93, 428),
        (4, "bfloat16", 0.85, 209),
        (4, "fp8", 0.95, 965),
        (8, "bfloat16", 0.95, 1540),
        (8, "fp8", 0.85, 2530),
    ],
)
def test_the_table_of_memory_fractions(tp: int, kv_dtype: str, fraction: float, thousands: int) -> None:
    """Of workloads.md, C1: with the 192.3 GB that the GPU really has."""
    assert Memory(KIMI, "int4", B200, tp, kv_dtype, fraction).kv_tokens == pytest.approx(1000 * thousands, rel=0.005)


def test_every_rank_holds_every_token() -> None:
    """So twice the ranks hold more tokens only by the weights that each rank is spared, and not by sharing KV."""
    assert KIMI.kv_token_bytes("bfloat16") == 61 * 576 * 2 == 70_272
    four, eight = Memory(KIMI, "int4", B200, 4, "bfloat16"), Memory(KIMI, "int4", B200, 8, "bfloat16")
    spared = KIMI.weight_bytes["int4"] / 4 - KIMI.weight_bytes["int4"] / 8
    assert eight.kv_tokens - four.kv_tokens == pytest.approx(spared / 70_272, rel=0.01)
    assert eight.host_tokens == four.host_tokens
    assert eight.load_back_tokens_per_s == four.load_back_tokens_per_s


def test_nvfp4_holds_less_than_twice_of_fp8_by_its_scales() -> None:
    """A byte of scale for 16 elements: 4.5 bits instead of 8."""
    fp8, nvfp4 = find_machine("kimi-nvfp4-tp4-fp8"), find_machine("kimi-nvfp4-tp4-nvfp4")
    for held in ("kv_tokens", "host_tokens", "load_back_tokens_per_s"):
        assert getattr(nvfp4, held) / getattr(fp8, held) == pytest.approx(16 / 9, rel=0.003)
    assert nvfp4.hardware == fp8.hardware


@pytest.mark.parametrize(
    ("name", "kv_tokens"),
    [
        ("kimi-int4-tp4-bf16", 346_000),
        ("kimi-int4-tp4-fp8", 691_000),
        ("kimi-int4-tp8-bf16", 1_400_000),
        ("kimi-int4-tp8-fp8", 2_810_000),
        ("kimi-nvfp4-tp4-fp8", 691_000),
        ("kimi-nvfp4-tp8-fp8", 2_810_000),
    ],
)
def test_the_capacities_that_the_published_studies_ran_with(name: str, kv_tokens: int) -> None:
    machine = find_machine(name)
    assert machine.kv_tokens == kv_tokens
    assert machine.host_tokens == (2_846_083 if "bf16" in name else 5_692_167)
    assert machine.hardware.accept_length == EAGLE3 == 2.3
    assert machine.hardware.prefill == hardware.load(name).prefill


def test_the_host_tier_loads_a_session_in_a_seventh_of_a_second() -> None:
    """100k tokens in BF16 are 7.03 GB on every rank: 0.14 s at 50 GB/s (workloads.md, C4)."""
    assert 100_000 / find_machine("kimi-int4-tp4-bf16").load_back_tokens_per_s == pytest.approx(0.14, abs=0.001)


def test_an_h200_is_slower() -> None:
    """Prompts by three times, decode steps by a fifth; with FP8 KV it has BF16's times."""
    h200, b200 = find_machine("kimi-int4-tp8-bf16-h200").hardware, find_machine("kimi-int4-tp8-bf16").hardware
    assert 2.5 < h200.prefill.seconds(8192, 0) / b200.prefill.seconds(8192, 0) < 3.5
    assert 1.1 < h200.decode.step_seconds(16, 8192) / b200.decode.step_seconds(16, 8192) < 1.3
    assert find_machine("kimi-int4-tp8-fp8-h200").hardware == h200


def test_h200_holds_less() -> None:
    """Its memory is 41.5 GB smaller, of which 90 % are for weights and KV."""
    h200, b200 = find_machine("kimi-int4-tp8-bf16-h200"), find_machine("kimi-int4-tp8-bf16")
    smaller = 0.9 * (B200.hbm_bytes - H200.hbm_bytes)
    assert b200.kv_tokens - h200.kv_tokens == pytest.approx(smaller / 70_272, rel=0.02)


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"148\.8 GB of weights a GPU do not fit into 0\.9 of 150\.8 GB; raise tp \(4\)"
    ):
        _ = Memory(KIMI, "int4", H200, 4, "fp8").kv_tokens


def test_kv_of_an_unknown_type() -> None:
    with pytest.raises(ValueError, match="kv_dtype must be one of bfloat16, fp8, nvfp4, not 'int2'"):
        KIMI.kv_token_bytes("int2")


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_can_be_used(name: str) -> None:
    machine = find_machine(name)
    assert machine.gpus in (4, 8)
    assert 262_144 < machine.kv_tokens <= machine.host_tokens
    assert 0 < machine.hardware.token_seconds(8, 100_000) < machine.hardware.prefill.seconds(8_000, 92_000)


def test_unknown_machine() -> None:
    with pytest.raises(ValueError, match="no machine 'h100'; known: kimi-int4-tp4-bf16, "):
        find_machine("h100")


@pytest.mark.parametrize("accept_length", [NO_SPECULATION, 2.5, DFLASH, DFLASH_TUNED])
def test_an_accept_length_changes_decoding_alone(accept_length: float) -> None:
    machine = find_machine("kimi-int4-tp4-bf16")
    varied = vary(machine, accept_length=accept_length)
    step = machine.hardware.decode.step_seconds(4, 100_000)
    assert varied.hardware.token_seconds(4, 100_000) == pytest.approx(step / accept_length)
    assert replace(varied, hardware=machine.hardware) == machine
    assert varied.hardware.prefill == machine.hardware.prefill


def test_dflash_decodes_as_much_faster_as_its_accept_length_says() -> None:
    """5.00 to 5.84 tokens a step are 17 %, where "about 20 %" was published (claims.md, row 5)."""
    machine = find_machine("kimi-int4-tp4-bf16")
    plain, tuned = (vary(machine, accept_length=length).hardware for length in (DFLASH, DFLASH_TUNED))
    assert plain.token_seconds(4, 100_000) / tuned.token_seconds(4, 100_000) == pytest.approx(1.168)


def test_without_a_host_tier() -> None:
    machine = find_machine("kimi-int4-tp4-bf16")
    assert vary(machine) == machine
    assert vary(machine, host_tier=False) == replace(machine, host_tokens=0)


@pytest.mark.parametrize("wrong", [0.0, 0.9, -1.0, float("nan")])
def test_an_accept_length_that_cannot_be(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"accept_length must be 1 \(no speculation\) or more"):
        vary(find_machine("kimi-int4-tp4-bf16"), accept_length=wrong)
