"""Where requests went, why, and how good that was. Rows of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from policies.types import Reason
from router.metrics import labels as of
from router.metrics.family import Family, Merge, Sample, counts, each_tally, one

if TYPE_CHECKING:
    from router.metrics.metrics import Metrics


def _policies(metrics: Metrics, _: float) -> Iterator[Sample]:
    yield ("live", metrics.balancer.policy.name), 1.0
    if metrics.balancer.shadow is not None:
        yield ("shadow", metrics.balancer.shadow.name), 1.0


def _expected(metrics: Metrics) -> dict[tuple[str, Reason], float]:
    told = {reason: tally for reason, tally in metrics.reasons.items() if tally.observed_s}
    queue = {("queue", reason): tally.queue_s for reason, tally in told.items()}
    return queue | {("prefill", reason): tally.prefill_s for reason, tally in told.items()}


def _regretted(metrics: Metrics) -> dict[tuple[str, str], int]:
    regret = metrics.balancer.regret
    kinds = (("elsewhere", regret.elsewhere), ("evicted", regret.evicted))
    return {(kind, reason): count for kind, tokens in kinds for reason, count in tokens.items()}


ROWS = (
    Family(
        "warmroute_choices_total",
        "counter",
        "choices",
        (of.REPLICA, of.REASON),
        "Choices of a replica; a request that is sent to another after a failure has several.",
        each_tally(lambda tally: tally.choices),
    ),
    Family(
        "warmroute_turns_total",
        "counter",
        "requests",
        (of.TURN, of.REASON),
        "Turns of sessions by where they went, seen from their conversation's KV, and by the reason of the choice.",
        counts(lambda m: {(turn, reason): n for reason, t in m.reasons.items() for turn, n in t.turns.items()}),
    ),
    Family(
        "warmroute_expected_seconds_total",
        "counter",
        "seconds",
        (of.TERM, of.REASON),
        "Seconds to the first token that were expected when the replica was chosen, of turns that had one.",
        counts(_expected),
    ),
    Family(
        "warmroute_observed_seconds_total",
        "counter",
        "seconds",
        (of.REASON,),
        "Seconds from the same choices to the first token; over the expected ones it is how far off they are.",
        counts(lambda m: {(reason,): t.observed_s for reason, t in m.reasons.items() if t.observed_s}),
    ),
    Family(
        "warmroute_first_token_ratio",
        "histogram",
        "ratio",
        (),
        "Observed over expected seconds of single turns: how many were off by how much. 1 is right.",
        one(lambda m: m.ratios),
    ),
    Family(
        "warmroute_regretted_prefill_tokens_total",
        "counter",
        "tokens",
        (of.KIND, of.REASON),
        "Tokens prefilled anew though they had been computed; needs --enable-cache-report.",
        counts(_regretted, of.KIND.values or (), Reason),
    ),
    Family(
        "warmroute_shadow_choices_total",
        "counter",
        "choices",
        (of.REASON, of.SHADOW_REASON, of.SAME),
        "Choices of the policy in charge beside those of its shadow.",
        counts(
            lambda m: {
                (reason, other, str(same).lower()): n for (reason, other, same), n in m.balancer.disagreements.items()
            }
        ),
    ),
    Family(
        "warmroute_policy_info",
        "gauge",
        "1",
        (of.ROLE, of.POLICY),
        "The policy in charge, and the one in its shadow.",
        _policies,
        Merge.MAX,
    ),
    Family(
        "warmroute_live_sessions",
        "gauge",
        "sessions",
        (),
        "Sessions of which a request ended within the last 10 minutes.",
        lambda m, now: [((), m.live.count(now))],
        Merge.MAX,
    ),
    Family(
        "warmroute_sessions",
        "gauge",
        "sessions",
        (),
        "Sessions that are remembered.",
        one(lambda m: len(m.balancer.directory)),
        Merge.MAX,
    ),
    Family(
        "warmroute_branches",
        "gauge",
        "conversations",
        (),
        "Their conversations and forks.",
        one(lambda m: m.balancer.directory.branch_count),
        Merge.MAX,
    ),
    Family(
        "warmroute_responses",
        "gauge",
        "responses",
        (),
        "Responses whose issuer is remembered, as many at most as sessions.",
        one(lambda m: len(m.balancer.responses)),
        Merge.MAX,
    ),
    Family(
        "warmroute_sessions_limit",
        "gauge",
        "sessions",
        (),
        "Sessions that are remembered at most.",
        one(lambda m: m.balancer.directory.max_sessions),
        Merge.MAX,
    ),
    Family(
        "warmroute_evicted_sessions_total",
        "counter",
        "sessions",
        (),
        "Sessions forgotten for want of room.",
        one(lambda m: m.balancer.directory.evicted),
    ),
    Family(
        "warmroute_dispersion",
        "gauge",
        "ratio",
        (),
        "How unevenly requests are spread, the last minute counting most.",
        one(lambda m: None if m.proxy is None else m.proxy.spread.dispersion),
        Merge.MAX,
    ),
    Family(
        "warmroute_spread_variance_seconds_total",
        "counter",
        "requests² s",
        (),
        "Variance of running requests per replica, summed over time.",
        one(lambda m: None if m.proxy is None else m.proxy.spread.variance_s),
    ),
    Family(
        "warmroute_spread_mean_seconds_total",
        "counter",
        "requests s",
        (),
        "Mean of running requests per replica, summed over time.",
        one(lambda m: None if m.proxy is None else m.proxy.spread.mean_s),
    ),
)
