"""Decisions: why replicas were chosen, and how right the expectations were."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board
from deploy.dashboards.panels import AMBER, RED, bars, lines, number
from deploy.dashboards.queries import Query, on_replica, ours, quantile, rate, total

OBSERVED = ours("warmroute_observed_seconds_total")
SPREAD = ours("warmroute_spread_variance_seconds_total"), ours("warmroute_spread_mean_seconds_total")


def decisions() -> Dashboard:
    return board(
        "decisions",
        "Decisions",
        "Why replicas were chosen, what was expected of them, and where the shadow policy would have gone.",
        [
            ("Why", _why()),
            ("Expected against observed", _expected()),
            ("What is believed of replicas", _beliefs()),
            ("Shadow policy", _shadow()),
        ],
    )


def _why() -> list[object]:
    choices = on_replica("warmroute_choices_total")
    return [
        lines(
            "Choices by reason",
            "The operations page explains each reason.",
            "reqps",
            Query(total(choices, "reason"), "{{reason}}"),
            stacked=True,
        ),
        lines(
            "First byte by reason, p90",
            "What a choice for that reason cost its client.",
            "s",
            Query(quantile(0.9, "warmroute_first_byte_seconds", "reason"), "{{reason}}"),
        ),
        lines(
            "Dispersion",
            "Variance over mean of running requests per replica: 0 is even, 1 is by lot, more when sessions fork.",
            "short",
            Query(f"sum ({rate(SPREAD[0])}) / sum ({rate(SPREAD[1])})", "dispersion"),
        ),
    ]


def _below(ratio: str) -> str:
    bucket = ours("warmroute_first_token_ratio_bucket", f'le="{ratio}"')
    return f"sum ({rate(bucket)})"


def _expected() -> list[object]:
    expected = ours("warmroute_expected_seconds_total")
    first = rate(ours("warmroute_first_token_ratio_count"))
    return [
        number(
            "Observed over expected",
            "Seconds to the first token. Above 1 the fleet is slower than believed; choices by seconds are then off.",
            "short",
            Query(f"{total(OBSERVED)} / {total(expected)}"),
            steps=((1.5, AMBER), (3, RED)),
            decimals=2,
        ),
        number(
            "Off by more than half",
            "Share of turns whose first token took less than half of what was expected, or more than twice.",
            "percentunit",
            Query(f"1 - ({_below('2.0')} - {_below('0.5')}) / sum ({first})"),
            decimals=0,
        ),
        lines(
            "Expected and observed, a turn",
            "Mean seconds to the first token: what was expected of queue and prefill, and what came.",
            "s",
            Query(f"{total(expected, 'term')} / ignoring (term) group_left () sum ({first})", "expected: {{term}}"),
            Query(f"{total(OBSERVED)} / sum ({first})", "observed"),
        ),
        lines(
            "Observed over expected by reason",
            "A reason far from 1 is one whose costs are misjudged.",
            "short",
            Query(f"{total(OBSERVED, 'reason')} / {total(expected, 'reason')}", "{{reason}}"),
        ),
        lines(
            "Observed over expected, percentiles",
            "Of single turns. A wide band is chance in the engines' batches; a shifted one is a wrong belief.",
            "short",
            *(Query(quantile(share, "warmroute_first_token_ratio"), f"p{share * 100:g}") for share in (0.1, 0.5, 0.9)),
            width=24,
        ),
    ]


def _beliefs() -> list[object]:
    return [
        lines(
            "Prefill factor",
            "Seconds of prefill over those of Kimi K2.5 on four B200. One above the others is a slow replica.",
            "short",
            Query(f"max by (replica) ({on_replica('warmroute_prefill_factor')})", "{{replica}}"),
        ),
        lines(
            "Decode step",
            "Seconds between two tokens of a lone answer, as learned.",
            "s",
            Query(f"max by (replica) ({on_replica('warmroute_decode_step_seconds')})", "{{replica}}"),
        ),
        lines(
            "Expected wait",
            "Seconds until a prefill sent now would begin: the term `queue` of a choice made now.",
            "s",
            Query(f"max by (replica) ({on_replica('warmroute_expected_wait_seconds')})", "{{replica}}"),
        ),
    ]


def _shadow() -> list[object]:
    shadow = ours("warmroute_shadow_choices_total")
    same, other = (ours("warmroute_shadow_choices_total", f'same="{value}"') for value in ("true", "false"))
    return [
        number(
            "Policies",
            "In charge, and in its shadow.",
            "short",
            Query(f"count by (role, policy) ({ours('warmroute_policy_info')})", "{{role}}: {{policy}}"),
            text=True,
            width=6,
        ),
        number(
            "Same replica",
            "Share of choices in which the shadow agreed. It says that policies differ, not which of them is better.",
            "percentunit",
            Query(f"{total(same)} / {total(shadow)}"),
            decimals=0,
            width=6,
        ),
        bars(
            "Disagreements",
            "Choices a second of another replica, by the reason of the policy in charge and the shadow's.",
            "reqps",
            Query(total(other, "reason, shadow_reason"), "{{reason}}, shadow: {{shadow_reason}}"),
            width=12,
        ),
    ]
