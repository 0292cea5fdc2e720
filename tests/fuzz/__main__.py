"""`make fuzz`: new cases for as long as FUZZ_S says (600), from a number on that FUZZ_SEED says (else the clock's).

A finding is told with its number, by which `python -m tests.fuzz NUMBER` runs it again. Exit code 1 when there is one.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from tests.fuzz import case
from tests.fuzz.oracle import Finding

REPORT_S = 10.0
ENOUGH = 20
"""Findings after which the rest of the time would tell little more."""


def main(numbers: list[int]) -> int:
    logging.disable()  # a refused sweep is in the findings already
    if numbers:
        for number in numbers:
            print(f"{number}: {case.run(number)} answers")
        return 0
    seed = first = int(os.environ.get("FUZZ_SEED") or time.time_ns())
    started, cpu = time.monotonic(), time.process_time()
    end = started + float(os.environ.get("FUZZ_S") or 600)
    reported, answers, findings = started, 0, 0
    while (now := time.monotonic()) < end and findings < ENOUGH:
        try:
            answers += case.run(seed)
        except (Finding, AssertionError, Exception) as finding:
            findings += 1
            print(f"FINDING {seed}: {type(finding).__name__}: {str(finding)[:2000]}", flush=True)
        seed += 1
        if now - reported > REPORT_S:
            reported = now
            rate = (seed - first) / (time.process_time() - cpu)
            print(f"{now - started:6.0f} s: {seed - first} cases, {answers} answers, {rate:.0f}/s, {findings} findings")
    print(f"cases {first} to {seed - 1}: {seed - first} cases, {answers} answers, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
