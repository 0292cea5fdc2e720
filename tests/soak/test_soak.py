"""The soak in its shortest form, and that it can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.fakes.process import ROOT
from tests.soak.ledger import Ledger
from tests.soak.watch import Sample, Watch


def test_half_a_minute_leaves_nothing_behind_and_breaks_nothing_without_a_fault() -> None:
    environment = os.environ | {"SOAK_S": "25", "SOAK_SESSIONS": "8", "SOAK_REPLICAS": "3"}
    command = [sys.executable, "-m", "tests.soak"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "verdict: passed" in run.stdout
    churn = re.search(r"(\d+) churn", run.stdout.splitlines()[-2])
    assert churn is not None
    assert int(churn[1]) >= 2


def test_a_fault_explains_what_breaks_on_its_replica_while_it_lasts_and_no_other() -> None:
    ledger = Ledger()
    assert not ledger.explained("a", 0.0)
    fault = ledger.begin("a", "kill")
    assert ledger.explained("a", ledger.now())
    assert ledger.explained(None, ledger.now())
    assert not ledger.explained("b", ledger.now())
    ledger.end(fault)
    assert ledger.explained("a", ledger.now()), "what was asked meanwhile may break a moment later"
    assert not ledger.explained("a", ledger.now() + 60), "but not what is asked long after"


def test_a_growing_memory_has_a_slope() -> None:
    watch = Watch(Ledger(), 1, "http://127.0.0.1:1")
    for minute in range(60):
        watch.samples.append(Sample(minute * 60, 70 + minute * 0.5, 0, 0, 0, 0, 0, 0))
    assert abs(watch.slope_mib_per_h(600) - 30) < 0.01
