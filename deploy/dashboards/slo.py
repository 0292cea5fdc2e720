"""SLO: what clients wait for, and how much of the error budget is left."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board, choice
from deploy.dashboards.panels import AMBER, GREEN, RED, heat, lines, number
from deploy.dashboards.queries import FAILED, Query, failed_share, ours, quantile, rate, total, within

BURNS = ((1, AMBER), (6, AMBER), (14.4, RED))
"""1 uses up the budget just at the end of its month; 6 in five days, 14.4 in two: Google's SRE workbook, chapter 5."""


def slo() -> Dashboard:
    return board(
        "slo",
        "SLO",
        "What clients wait for: first bytes, gaps, whole requests; and the error budget.",
        [
            ("Error budget", _budget()),
            ("Time to the first byte", _first_byte()),
            ("Gaps between chunks", _gaps()),
            ("Waiting and whole requests", _whole()),
        ],
        choice("objective", "Objective", "Share of requests that must not fail.", ("0.99", "0.995", "0.999"), "0.999"),
        choice(
            "ttft",
            "First byte within, s",
            "A bound of the histogram.",
            ("1.0", "2.5", "5.0", "10.0", "30.0", "60.0"),
            "10.0",
        ),
        choice("gap", "Gap within, s", "A bound of the histogram.", ("0.03", "0.05", "0.1", "0.25"), "0.1"),
    )


def _burn(window: str) -> str:
    return f"({failed_share(window)}) / (1 - $objective)"


def _budget() -> list[object]:
    return [
        number(
            "Served",
            "Share of requests that did not fail, over the time shown. What clients ended or got wrong is left out.",
            "percentunit",
            Query(f"1 - ({failed_share('$__range')})"),
            base=RED,
            steps=((0.99, AMBER), (0.999, GREEN)),
            decimals=3,
        ),
        number(
            "Budget left",
            "Of the failures that the objective allows for the time shown. Below 0 it is spent.",
            "percentunit",
            Query(f"1 - {_burn('$__range')}"),
            base=RED,
            steps=((0, AMBER), (0.25, GREEN)),
            decimals=0,
        ),
        lines(
            "Burn rate",
            "How many times too fast the budget is spent. WarmrouteErrorBudgetFast: above 14.4 over 5 minutes and 1 "
            "hour; WarmrouteErrorBudgetSlow: above 6 over 30 minutes and 6 hours.",
            "short",
            *(Query(_burn(window), window) for window in ("5m", "30m", "1h", "6h")),
            steps=BURNS,
        ),
        lines(
            "Failures by end",
            "Who failed requests, and how far they had come.",
            "reqps",
            Query(
                total(ours("warmroute_requests_total", FAILED), "cause, phase") + " > 0",
                "{{cause}} in {{phase}}",
            ),
            stacked=True,
        ),
    ]


def _first_byte() -> list[object]:
    return [
        number(
            "Within the bound",
            "Share of requests whose first byte came within the time chosen above.",
            "percentunit",
            Query(within("warmroute_first_byte_seconds", "$ttft")),
            base=RED,
            steps=((0.95, AMBER), (0.99, GREEN)),
            decimals=1,
        ),
        lines(
            "First byte, percentiles",
            "From the whole request to the answer's first byte.",
            "s",
            *(
                Query(quantile(share, "warmroute_first_byte_seconds"), f"p{share * 100:g}")
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        heat(
            "First byte",
            "Requests by their time to the first byte. Two bands are warm turns and cold ones.",
            "s",
            Query(f"sum by (le) (increase({ours('warmroute_first_byte_seconds_bucket')}[$__rate_interval]))", "{{le}}"),
        ),
    ]


def _gaps() -> list[object]:
    return [
        number(
            "Within the bound",
            "Share of streamed answers whose mean gap was within the time chosen above.",
            "percentunit",
            Query(within("warmroute_chunk_gap_seconds", "$gap")),
            base=RED,
            steps=((0.9, AMBER), (0.99, GREEN)),
            decimals=1,
        ),
        lines(
            "Mean gap of an answer, percentiles",
            "Time between two chunks, averaged over each answer. It grows with the batch and neighbours' prefills.",
            "s",
            *(Query(quantile(share, "warmroute_chunk_gap_seconds"), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)),
        ),
        lines(
            "Answers by tokens",
            "Tokens of answers a second, all replicas.",
            "short",
            Query(total(ours("warmroute_completion_tokens_total")), "tokens"),
            width=12,
        ),
    ]


def _whole() -> list[object]:
    durations = ours("warmroute_request_seconds_count")
    return [
        lines(
            "Waiting in the router",
            "From the whole request to its being placed where it was served: the queue, and replicas that failed it.",
            "s",
            *(Query(quantile(share, "warmroute_wait_seconds"), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)),
        ),
        lines(
            "Whole requests, percentiles",
            "From a request's first byte to its end.",
            "s",
            *(Query(quantile(share, "warmroute_request_seconds"), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)),
        ),
        lines(
            "Requests",
            "A second, and refused of them.",
            "reqps",
            Query(f"sum ({rate(durations)})", "all"),
            Query(total(ours("warmroute_refusals_total")), "refused"),
        ),
    ]
