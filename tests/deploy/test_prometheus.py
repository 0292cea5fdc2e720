"""Every query of dashboards and rules, asked of a real Prometheus that watched a real router under load."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.queries import Target, filled, rules, targets, unfiltered
from tests.deploy.watched import Watched, watched

pytestmark = pytest.mark.prometheus

SECONDS = 40.0
TARGETS = list(targets())
RULES = list(rules())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("watched"), SECONDS) as run:
        yield run


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_a_panel_has_data(seen: Watched, target: Target) -> None:
    series = seen.query_range(target.expr)
    assert any(math.isfinite(float(value)) for each in series for _, value in each["values"]), target.expr
    for label in target.legend.replace("}}", "{{").split("{{")[1::2]:
        assert all(label in each["metric"] for each in series), f"{label} of its legend"


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_has_something_to_judge(seen: Watched, rule: dict[str, Any]) -> None:
    """Its comparisons are answered with 0 or 1 for each series, and so with nothing only where there is no data."""
    expr = unfiltered(filled(rule["expr"]))
    assert " bool " in expr
    assert seen.query(expr), expr


def test_what_happened_is_seen(seen: Watched) -> None:
    """That of the run which the panels are for: a scale-out, a death, forks, clients that left."""

    def value(expr: str) -> float:
        return sum(float(each["value"][1]) for each in seen.query(expr))

    assert value("warmroute_live_sessions") > 20
    assert value('warmroute_turns_total{turn="stayed"}') > 0.7 * value("warmroute_turns_total")
    assert value('warmroute_turns_total{turn="lost"}') > 0, "of the replica that died"
    assert value('warmroute_requests_total{cause="client"}') > 0
    assert value('warmroute_requests_total{cause="upstream", phase="body"}') > 0, "broken off by that death"
    assert value("count (warmroute_replica_state{state='ready'} == 1)") == 4
    assert value("min (warmroute_resident_conversations)") > 0, "the late one serves, too"
    assert value("sum (warmroute_cached_tokens_total) / sum (warmroute_prompt_tokens_total)") > 0.5
    assert value("sum (sglang:num_aborted_requests_total)") > 0


def test_the_exposition_passes_promtool(seen: Watched) -> None:
    text = httpx.get(f"{seen.router.admin_url}/metrics", trust_env=False).text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_cardinality_is_that_of_the_fleet(seen: Watched) -> None:
    """Series of the router: a fixed number and some for each replica, however many sessions came."""
    series = seen.query('count ({__name__=~"warmroute_.*", job="warmroute"})')
    assert float(series[0]["value"][1]) < 800 + 4 * 60
