"""Sessions and KV: where sessions live, and what of their KV is found again."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board
from deploy.dashboards.fleet import CLIFF
from deploy.dashboards.panels import AMBER, GREEN, RED, bars, lines, number
from deploy.dashboards.queries import Query, engine, of_capacity, on_replica, ours, rate, total


def sessions() -> Dashboard:
    return board(
        "sessions",
        "Sessions and KV",
        "Where sessions live, what moves, and how much of their KV is found again.",
        [("Hit rate", _hits()), ("Homes", _homes()), ("What moves", _moves()), ("Capacity", _capacity())],
    )


def _hit(by: str = "") -> str:
    cached, prompt = on_replica("warmroute_cached_tokens_total"), on_replica("warmroute_prompt_tokens_total")
    return f"{total(cached, by)} / {total(prompt, by)}"


def _regretted(kind: str) -> str:
    regretted = ours("warmroute_regretted_prefill_tokens_total", f'kind="{kind}"')
    return f"sum ({rate(regretted)}) / {total(ours('warmroute_prompt_tokens_total'))}"


def _hits() -> list[object]:
    return [
        number(
            "Hit rate",
            "Cached over prompt tokens, as engines report. Coding agents that stay at home reach 0.9 and more.",
            "percentunit",
            Query(_hit()),
            base=RED,
            steps=((0.5, AMBER), (0.8, GREEN)),
            decimals=1,
        ),
        number(
            "Again: was elsewhere",
            "Share of prompt tokens that were prefilled though another replica held them: the price of moving.",
            "percentunit",
            Query(_regretted("elsewhere")),
            steps=((0.05, AMBER), (0.15, RED)),
            decimals=1,
        ),
        number(
            "Again: was evicted",
            "Share of prompt tokens that were computed before and are nowhere any more: the price of little memory.",
            "percentunit",
            Query(_regretted("evicted")),
            steps=((0.05, AMBER), (0.15, RED)),
            decimals=1,
        ),
        number(
            "Live sessions",
            "Sessions of which a request ended in the last 10 minutes.",
            "short",
            Query(f"sum ({ours('warmroute_live_sessions')})"),
        ),
        number(
            "Conversations and forks",
            "That are remembered, of all sessions.",
            "short",
            Query(f"sum ({ours('warmroute_branches')})"),
        ),
        number(
            "Sessions forgotten",
            "For want of room in the directory, in the last hour. Raise directory.max_sessions.",
            "short",
            Query(f"sum (increase({ours('warmroute_evicted_sessions_total')}[1h]))"),
            steps=((1, AMBER),),
            decimals=0,
        ),
        lines(
            "Hit rate by reason",
            "`home` should be near 1; `new` shows what shared system prompts give.",
            "percentunit",
            Query(_hit("reason"), "{{reason}}"),
            top=1,
        ),
        lines(
            "Hit rate by replica",
            "One below the others: restarted, too small, or flushed.",
            "percentunit",
            Query(_hit("replica"), "{{replica}}"),
            top=1,
        ),
        lines(
            "Tokens prefilled again",
            "A second, by what would have spared it and by the reason of the choice.",
            "short",
            Query(
                total(ours("warmroute_regretted_prefill_tokens_total"), "kind, reason") + " > 0",
                "{{kind}}, chosen as {{reason}}",
            ),
            stacked=True,
        ),
    ]


def _homes() -> list[object]:
    return [
        lines(
            "Homes",
            "Conversations whose KV is believed to be on each replica. A new replica fills as new sessions come.",
            "short",
            Query(f"sum by (replica) ({on_replica('warmroute_resident_conversations')})", "{{replica}}"),
        ),
        bars(
            "Homes now",
            "Even is good, but hit rate goes first.",
            "short",
            Query(f"sum by (replica) ({on_replica('warmroute_resident_conversations')})", "{{replica}}"),
        ),
        lines(
            "Sessions",
            "Live, and remembered.",
            "short",
            Query(f"sum ({ours('warmroute_live_sessions')})", "live"),
            Query(f"sum ({ours('warmroute_sessions')})", "remembered"),
        ),
    ]


def _moves() -> list[object]:
    turns = ours("warmroute_turns_total")
    gone = ours("warmroute_turns_total", 'turn=~"moved|returned|split|lost|evicted"')
    forks = ours("warmroute_turns_total", 'turn="split"')
    return [
        lines(
            "Where turns went",
            "Seen from their conversation's KV. `stayed` should be nearly all.",
            "reqps",
            Query(total(turns, "turn"), "{{turn}}"),
            stacked=True,
        ),
        lines(
            "Turns that left home",
            "Share of turns, by where they went. At a scale-out `moved` may rise for minutes; `lost` follows replicas "
            "that went out, `evicted` too little KV memory.",
            "percentunit",
            Query(f"{total(gone, 'turn')} / ignoring (turn) group_left () {total(turns)}", "{{turn}}"),
        ),
        lines(
            "Moves by reason",
            "Turns that left home, by the reason of the choice.",
            "reqps",
            Query(total(gone, "reason"), "{{reason}}"),
            stacked=True,
        ),
        lines(
            "Scale-out: choices by replica",
            "A new replica's share should grow by new sessions, not by moved ones.",
            "reqps",
            Query(total(on_replica("warmroute_choices_total"), "replica"), "{{replica}}"),
            stacked=True,
        ),
        lines(
            "Scale-out: what new homes are made of",
            "Choices that made a home, by replica and reason.",
            "reqps",
            Query(
                total(
                    on_replica("warmroute_choices_total", 'reason=~"new|moved|split|evicted|home_lost"'),
                    "replica, reason",
                ),
                "{{replica}} {{reason}}",
            ),
            stacked=True,
        ),
        lines(
            "Forks split",
            "Turns placed away from their conversation while others of it were under way.",
            "reqps",
            Query(f"sum ({rate(forks)}) or vector(0)", "split"),
        ),
    ]


def _capacity() -> list[object]:
    return [
        lines(
            "KV in use by live sessions",
            "Live tokens over capacity. The dashed lines are those of WarmrouteKVCliff.",
            "percentunit",
            Query(
                of_capacity("warmroute_live_tokens", "replica"),
                "{{replica}}",
            ),
            steps=CLIFF,
        ),
        lines(
            "Resident tokens",
            "Believed to be cached, over what is believed to fit. Full is normal: it is a cache.",
            "percentunit",
            Query(
                of_capacity("warmroute_resident_tokens", "replica"),
                "{{replica}}",
            ),
        ),
        lines(
            "Engines: where prompt tokens came from",
            "A second: computed (`input`), or found in GPU memory, host tier or storage.",
            "short",
            Query(total(engine("prefill_effective_tokens_total"), "mode"), "{{mode}}"),
            stacked=True,
        ),
    ]
