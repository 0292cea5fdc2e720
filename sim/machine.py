"""What the hardware of a replica is: its times, and the KV tokens that it holds and moves.

Capacities are reckoned, not listed: `Memory` says how many tokens fit beside the weights. They are given to three
figures, as the memory that CUDA graphs and activations take is not known better. `MACHINES` are those there are, by
name: model, quantisation of the weights, tensor-parallel ranks, KV type and, when it is not a B200, the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from sim import hardware
from sim.hardware import Decode, Hardware, Prefill

NO_SPECULATION = 1.0
"""Accept length of plain decoding: a step yields one token of each request."""

EAGLE3 = hardware.ACCEPT_LENGTH
"""Of Kimi K2.6's EAGLE3 draft model on long multi-turn prompts (lightseekorg/kimi-k2.6-eagle3-mla: 2.29)."""

EAGLE3_MIXED = 2.5
"""Of the same on SPEED-Bench as a whole, which Dynamo's recipe for this model uses (2.49)."""

DFLASH = 5.0
"""Of DFlash as it comes, and below after fine-tuning on coding traces (Modal, "How to serve trillions of tokens for
trillion-parameter coding agents", 2026-09-23)."""

DFLASH_TUNED = 5.84


@dataclass(frozen=True, slots=True)
class Model:
    """Of a model, what takes memory."""

    weight_bytes: Mapping[str, int]
    """By quantisation, spread over the tensor-parallel ranks."""
    layers: int
    kv_elements: int
    """Of a token in one layer. Every rank holds them all, as multi-head latent attention has one latent for all
    heads and nothing to split (vLLM's blog on Kimi K2.6, 2026-08-07, says so of this very model)."""

    def kv_token_bytes(self, kv_dtype: str) -> int:
        """Bytes of a token's KV on every rank."""
        bits = KV_ELEMENT_BITS.get(kv_dtype)
        if bits is None:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_ELEMENT_BITS)}, not {kv_dtype!r}")
        return int(self.layers * self.kv_elements * bits / 8)


KV_ELEMENT_BITS = {"bfloat16": 16.0, "fp8": 8.0, "nvfp4": 4.5}
"""NVFP4 with a scale of 8 bits for each 16 elements, as SGLang's `MLATokenToKVPoolFP4` keeps them: 0.56 of FP8."""

KIMI = Model({"int4": 595 * 10**9, "nvfp4": 595 * 10**9}, layers=61, kv_elements=512 + 64)
"""Kimi K2.5 and K2.6: latent rank 512 and 64 rotary elements (the model's config). The INT4 checkpoint has 595 GB;
that of NVFP4 (4.5 bits a weight) is about as large. 70,272 bytes a token in BF16, 35,136 in FP8, 19,764 in NVFP4."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, in bytes and seconds."""

    hbm_bytes: int
    load_back_bytes_per_s: float = 50e9
    """From the host: PCIe Gen5 x16 (nominally 64 GB/s) as HGX boards have it. Each rank loads its own copy."""


B200 = Gpu(183_359 * 2**20)
"""192.3 GB as nvidia-smi shows (183,359 MiB)."""

B200_NOMINAL = replace(B200, hbm_bytes=180 * 10**9)
"""With the 180 GB of the datasheet, by which public claims reckon."""

H200 = Gpu(143_771 * 2**20)
"""150.8 GB as nvidia-smi shows (143,771 MiB; 141 GB on paper)."""

GPUS = {"b200_sxm": B200, "h200_sxm": H200}
"""By the name that the tables of times have for them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How a replica's memory is used."""

    model: Model
    quantisation: str
    """Of the weights."""
    gpu: Gpu
    tp: int
    """Tensor-parallel ranks, one a GPU."""
    kv_dtype: str
    fraction: float = 0.90
    """Of the GPU for weights and KV, as SGLang's `--mem-fraction-static`. Draft weights come out of it, too."""
    host_bytes: int = 200 * 10**9
    """Host tier of each rank, as SGLang's `--hicache-size`: every rank keeps a full copy there, too."""

    @property
    def kv_tokens(self) -> int:
        """Tokens in GPU memory, to three figures. ValueError when the weights leave no room."""
        weights = self.model.weight_bytes[self.quantisation] / self.tp
        free = self.gpu.hbm_bytes * self.fraction - weights
        if free <= 0:
            raise ValueError(
                f"{weights / 1e9:.1f} GB of weights a GPU do not fit into {self.fraction:g} of "
                f"{self.gpu.hbm_bytes / 1e9:.1f} GB; raise tp ({self.tp}) or fraction"
            )
        return int(float(f"{free / self.model.kv_token_bytes(self.kv_dtype):.3g}"))

    @property
    def host_tokens(self) -> int:
        """Tokens in the host tier."""
        return self.host_bytes // self.model.kv_token_bytes(self.kv_dtype)

    @property
    def load_back_tokens_per_s(self) -> float:
        """From the host tier to the GPUs."""
        return self.gpu.load_back_bytes_per_s / self.model.kv_token_bytes(self.kv_dtype)


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica's hardware, and what it holds in tokens."""

    hardware: Hardware
    """Its times, with the accept length of speculation."""
    gpus: int
    kv_tokens: int
    host_tokens: int
    """0 is no host tier."""
    load_back_tokens_per_s: float


def vary(machine: Machine, *, host_tier: bool = True, accept_length: float | None = None) -> Machine:
    """The machine, without its host tier unless that is wanted, and with another accept length (None: its own).

    ValueError for an accept length below 1.
    """
    if accept_length is not None:
        if not accept_length >= 1:
            raise ValueError(f"accept_length must be 1 (no speculation) or more, not {accept_length}")
        machine = replace(machine, hardware=replace(machine.hardware, accept_length=accept_length))
    return machine if host_tier else replace(machine, host_tokens=0)


def _machine(memory: Memory, times: Callable[[], Hardware]) -> Machine:
    return Machine(times(), memory.tp, memory.kv_tokens, memory.host_tokens, memory.load_back_tokens_per_s)


def _study(kv_tokens: int) -> Machine:
    """The replica of the first design study (placement.md, section 3), by whose figures its bars are set.

    Prefill 0.03 s + n / 15,000 * (1 + position / 150,000), decode 12 ms + 0.4 ms * batch + 10 ns * contexts: the table
    of four values is that very formula. Its decoding went on, slower, beside a prefill; here it rests.
    """
    attention = 1 / 15_000 / 150_000
    contexts, batches = (0.0, 1e6), (0.0, 1e3)
    seconds = [[0.012 + 4e-4 * batch + 1e-8 * batch * context for batch in batches] for context in contexts]
    times = Hardware(
        Prefill(0.03, 1 / 15_000, attention, attention), Decode(contexts, batches, seconds), NO_SPECULATION
    )
    return Machine(times, 4, kv_tokens, 4 * kv_tokens, 150_000.0)


def _presets() -> Iterator[tuple[str, Memory, Callable[[], Hardware]]]:
    for table, key in hardware.TABLES.items():
        memory = Memory(KIMI, table.split("-")[1], GPUS[key.system], key.tp, key.kv_dtype)
        times = partial(hardware.load, table)
        yield table, memory, times
        if key.kv_dtype == "fp8":
            yield table.replace("fp8", "nvfp4"), replace(memory, kv_dtype="nvfp4"), times
        if key.system == "h200_sxm":
            yield table.replace("bf16", "fp8"), replace(memory, kv_dtype="fp8"), times


MACHINES: dict[str, Callable[[], Machine]] = {
    **{name: partial(_machine, memory, times) for name, memory, times in _presets()},
    "study-bf16": partial(_study, 450_000),
    "study-fp8": partial(_study, 900_000),
}
"""Those with NVFP4 KV have the times of FP8, and an H200 with FP8 KV those of BF16: nothing better is known. Reading
fewer bytes should make decoding faster, unpacking them slower."""

DEFAULT_MACHINE = "kimi-int4-tp4-bf16"


def find_machine(name: str) -> Machine:
    """By name. Raises ValueError that names those there are."""
    make = MACHINES.get(name)
    if make is None:
        raise ValueError(f"no machine {name!r}; known: {', '.join(MACHINES)}")
    return make()
