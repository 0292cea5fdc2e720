"""Makes the tables of step times in `sim/data/aic_kimi_b200` anew, from NVIDIA AIConfigurator's measured operators.

It runs in an environment of its own, as AIConfigurator brings half of a data centre's tools with it:

    python3.11 -m venv aic && aic/bin/pip install aiconfigurator==0.12.0 aiconfigurator-core==0.12.0
    aic/bin/python benchmarks/step_times.py sim/data/aic_kimi_b200
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

VERSION = "0.5.14"
"""Of SGLang, whose operators were measured."""
INT4, NVFP4 = "moonshotai/Kimi-K2.5", "nvidia/Kimi-K2.6-NVFP4"
KEYS = (
    *((model, "b200_sxm", tp, kv) for model in (INT4, NVFP4) for tp in (4, 8) for kv in ("bfloat16", "fp8")),
    # FP8 KV is left out: a decode step takes several times as long as with BF16 by these operators, which no
    # measurement of a server bears out.
    (INT4, "h200_sxm", 8, "bfloat16"),
)
CONTEXTS = (8192, 32768, 65536, 100_000, 131_072, 200_000)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PREFIXES = (0, 16384, 65536, 98304, 131_072, 196_608)
NEW = (256, 512, 1024, 2048, 4096, 8192, 16384)

Key = tuple[str, str, int, str]


def estimate(key: Key, mode: str, **lengths: int) -> Any:
    from aiconfigurator.cli import api  # type: ignore[import-not-found,unused-ignore]  # in its own environment only

    model, system, tp, kv = key
    shape = {"tp_size": tp, "moe_tp_size": tp, "moe_ep_size": 1, "kvcache_quant_mode": kv}
    return api.cli_estimate(
        model, system, mode=mode, backend_name="sglang", backend_version=VERSION, **shape, **lengths
    )


def decode(key: Key) -> Iterator[tuple[int, int, int, float, float]]:
    for context in CONTEXTS:
        for batch in BATCHES:
            made = estimate(key, "static_gen", isl=context, osl=2, batch_size=batch)
            yield context, batch, 0, round(made.tpot, 3), round(made.memory, 2)


def prefill(key: Key) -> Iterator[tuple[int, int, int, float, float]]:
    for prefix in PREFIXES:
        for new in NEW:
            made = estimate(key, "static_ctx", isl=prefix + new, osl=1, prefix=prefix, batch_size=1)
            yield prefix, new, 1, round(made.ttft, 3), round(made.memory, 2)


def write(path: Path, columns: str, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns.split(","))
    table.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    logging.disable(logging.CRITICAL)
    place = Path(sys.argv[1])
    common = "model,system,backend,backend_version,tp,moe_tp,moe_ep,kv_dtype"
    for name, columns, make in (
        ("decode_latency", "context_tokens,batch,spec_nextn,decode_step_ms,mem_gb_per_gpu", decode),
        ("prefill_latency", "prefix_tokens,new_tokens,batch,prefill_ms,mem_gb_per_gpu", prefill),
    ):
        rows = [
            (key[0], key[1], "sglang", VERSION, key[2], key[2], 1, key[3], *row) for key in KEYS for row in make(key)
        ]
        write(place / f"{name}.csv.gz", f"{common},{columns}", rows)
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
