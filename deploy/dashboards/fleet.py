"""Fleet: is it healthy, and how full is it?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.board import board
from deploy.dashboards.panels import AMBER, GREEN, RED, bars, lines, number, states
from deploy.dashboards.queries import Query, engine, failed_share, of_capacity, on_replica, ours, quantile, rate, total

CLIFF = ((0.7, AMBER), (0.8, RED))
"""Of live tokens over capacity; see the alert WarmrouteKVCliff."""


def fleet() -> Dashboard:
    return board(
        "fleet",
        "Fleet",
        "Is it healthy, and how full is it? Begin here.",
        [
            ("Healthy?", _healthy()),
            ("Full?", _full()),
            ("Under pressure", _pressure()),
            ("What becomes of requests", _requests()),
            ("Shared state", _shared()),
            ("Router", _router()),
        ],
    )


def _healthy() -> list[object]:
    ready = on_replica("warmroute_replica_state", 'state="ready"')
    out = on_replica("warmroute_replica_state", 'state!="ready"')
    return [
        number(
            "Replicas ready",
            "Replicas that at least one router sends requests to. 0: nothing is served; see WarmrouteNoReplicaReady.",
            "short",
            Query(f"sum (max by (replica) ({ready}))"),
            base=RED,
            steps=((1, GREEN),),
        ),
        number(
            "Replicas out",
            "Replicas that drain, are ejected or half open for some router. `warmroute replicas` tells why.",
            "short",
            Query(f"sum (max by (replica) ({out}))"),
            steps=((1, AMBER),),
        ),
        number(
            "Requests",
            "Requests that ended, by whatever cause.",
            "reqps",
            Query(total(ours("warmroute_requests_total"))),
        ),
        number(
            "Failed",
            "Share of requests that the service failed: the router, a replica, or a timeout. What clients ended "
            "is left out. From 0.1 % on it eats into a budget of three nines.",
            "percentunit",
            Query(failed_share()),
            steps=((0.001, AMBER), (0.01, RED)),
            decimals=2,
        ),
        number(
            "First byte, p99",
            "From the whole request to its first byte, 99th percentile. The SLO dashboard has more.",
            "s",
            Query(quantile(0.99, "warmroute_first_byte_seconds")),
            steps=((10, AMBER), (30, RED)),
        ),
        number(
            "KV in use by live sessions",
            "Tokens of sessions at work over what the fleet's KV caches hold. Past the cliff, at about 0.8, hardly "
            "anything is found again, and no placement helps: add replicas.",
            "percentunit",
            Query(of_capacity("warmroute_live_tokens")),
            steps=CLIFF,
            decimals=0,
        ),
    ]


def _full() -> list[object]:
    return [
        lines(
            "KV in use by live sessions",
            "Live tokens over capacity, by replica. The dashed lines are those of WarmrouteKVCliff.",
            "percentunit",
            Query(of_capacity("warmroute_live_tokens", "replica"), "{{replica}}"),
            steps=CLIFF,
        ),
        lines(
            "Requests in flight",
            "By replica, of all routers chosen. One far above the others: a slow one, or a session with many forks.",
            "short",
            Query(f"sum by (replica) ({on_replica('warmroute_in_flight_requests')})", "{{replica}}"),
        ),
        lines(
            "Awaiting the first token",
            "Requests queued in the engine or being prefilled, by replica. Rising everywhere: the fleet is too small.",
            "short",
            Query(f"sum by (replica) ({on_replica('warmroute_pending_requests')})", "{{replica}}"),
        ),
        lines(
            "Expected wait",
            "Seconds until a prefill sent now would begin, as the router reckons it.",
            "s",
            Query(f"max by (replica) ({on_replica('warmroute_expected_wait_seconds')})", "{{replica}}"),
            steps=((30, RED),),
        ),
        lines(
            "Engines: running and queued",
            "Requests in the engines' running batches and queues, whoever sent them.",
            "short",
            Query(f"sum ({engine('num_running_reqs')})", "running"),
            Query(f"sum ({engine('num_queue_reqs')})", "queued"),
        ),
        lines(
            "Engines: KV in use",
            "Share of an engine's KV pool that running requests hold; what is cached but free to go does not count. "
            "Near 1 it retracts requests.",
            "percentunit",
            Query(f"max by (instance) ({engine('token_usage')})", "{{instance}}"),
            steps=((0.9, AMBER), (0.97, RED)),
            top=1,
        ),
    ]


def _pressure() -> list[object]:
    opened = on_replica("warmroute_breaker_state", 'state!="closed"')
    shed = ours("warmroute_refusals_total", 'reason=~"room_full|wait_too_long|kv_full|queue_full"')
    return [
        lines(
            "Waiting in the router",
            "Requests in the wait room, for a cap or at the KV gate.",
            "short",
            Query(f"sum by (instance) ({ours('warmroute_waiting_requests')})", "{{instance}}"),
            width=6,
        ),
        lines(
            "Sessions held back",
            "At the KV gate, as the live ones do not fit the KV caches; and those let in. None below the cliff.",
            "short",
            Query(f"sum ({ours('warmroute_held_sessions')})", "held back"),
            Query(f"sum ({ours('warmroute_admitted_sessions')})", "let in"),
            width=6,
        ),
        lines(
            "Shed",
            "Requests refused for want of room, by code.",
            "reqps",
            Query(total(shed, "reason"), "{{reason}}"),
            stacked=True,
            width=6,
        ),
        lines(
            "Slow, or out of favour",
            "By how much a replica is slower than its fleet, 1 unless it is; and 1 while its breaker is not closed.",
            "short",
            Query(f"max by (replica) ({on_replica('warmroute_slowness_ratio')})", "{{replica}} slowness"),
            Query(f"max by (replica) ({opened})", "{{replica}} breaker"),
            width=6,
        ),
    ]


def _requests() -> list[object]:
    state = on_replica("warmroute_replica_state", 'state="ready"')
    prompts, completions = (rate(on_replica(f"warmroute_{kind}_tokens_total")) for kind in ("prompt", "completion"))
    return [
        lines(
            "Requests by end",
            "Who ended them, and how far they had come. `upstream` in `body` are answers that broke off.",
            "reqps",
            Query(total(ours("warmroute_requests_total"), "cause, phase") + " > 0", "{{cause}} in {{phase}}"),
            stacked=True,
        ),
        lines(
            "Refusals",
            "Requests the router answered itself, by code; the operations page says what to do for each.",
            "reqps",
            Query(total(ours("warmroute_refusals_total"), "reason") + " > 0", "{{reason}}"),
            stacked=True,
        ),
        lines(
            "Redispatches",
            "Requests sent to another replica after one failed them, by how it failed.",
            "reqps",
            Query(total(ours("warmroute_redispatches_total"), "why"), "{{why}}"),
            stacked=True,
        ),
        states(
            "Replicas",
            "Ready, or out: ejected, draining, half open.",
            Query(f"min by (replica) ({state})", "{{replica}}"),
            {1: ("ready", GREEN), 0: ("out", RED)},
        ),
        lines(
            "Age of load reports",
            "By the engine's own clock. Past 10 s a report counts for nothing, and others' requests are not seen.",
            "s",
            Query(f"max by (replica) ({on_replica('warmroute_report_age_seconds')})", "{{replica}}"),
            steps=((10, AMBER), (30, RED)),
        ),
        bars(
            "Tokens served",
            "Prompt and answer tokens a second, by replica.",
            "short",
            Query(
                f"sum by (replica) ({prompts} + {completions})",
                "{{replica}}",
            ),
        ),
    ]


def _shared() -> list[object]:
    return [
        states(
            "Store",
            "Whether a router's store does what it is asked for. While it is away, requests are served by what each "
            "router knows itself. Nothing here where none is configured.",
            Query(f"min by (instance) ({ours('warmroute_store_up')})", "{{instance}}"),
            {1: ("up", GREEN), 0: ("away", RED)},
        ),
        lines(
            "Other routers heard",
            "By each router; workers count, too. Lines that stay apart: see WarmrouteRoutersDisagree.",
            "short",
            Query(f"min by (instance) ({ours('warmroute_store_routers')})", "{{instance}}"),
        ),
        lines(
            "New sessions by what the store said",
            "First requests of sessions that a router did not know. `claimed`: nobody did. `adopted`: another router "
            "did, and they went to its home. `late`, `failed` and `not_asked` were placed without an answer.",
            "reqps",
            Query(total(ours("warmroute_store_claims_total"), "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        lines(
            "Wait for the store",
            "What first requests of unknown sessions waited for its answer; `store.wait_s` at most, 20 ms by default.",
            "s",
            Query(quantile(0.5, "warmroute_store_claim_seconds"), "p50"),
            Query(quantile(0.99, "warmroute_store_claim_seconds"), "p99"),
            steps=((0.02, AMBER),),
        ),
        lines(
            "Notes",
            "Homes told to the other routers and heard from them; `restored` after the store had forgotten, `dropped` "
            "when more wait than are kept.",
            "short",
            Query(total(ours("warmroute_store_notes_total"), "direction"), "{{direction}}"),
        ),
        lines(
            "Faults, and homes untold",
            "Times a second that the store did not do it, by what it was asked for; and homes that wait to be told.",
            "short",
            Query(total(ours("warmroute_store_faults_total"), "op"), "{{op}}"),
            Query(f"sum ({ours('warmroute_store_untold')})", "untold"),
        ),
    ]


def _router() -> list[object]:
    return [
        lines(
            "Event loop",
            "How late a timer came: what holds up the loop holds up every stream. Some ms are well; 0.1 s is too much.",
            "s",
            Query(quantile(0.99, "warmroute_loop_lag_seconds", "instance"), "{{instance}} p99"),
            Query(f"max by (instance) ({ours('warmroute_loop_lag_max_seconds')})", "{{instance}} most"),
            steps=((0.1, AMBER), (0.5, RED)),
            width=6,
        ),
        lines(
            "CPU",
            "Cores in use. The router is one process with one loop: near 1 it is full; run another.",
            "short",
            Query(f"sum by (instance) (rate({ours('process_cpu_seconds_total')}[$__rate_interval]))", "{{instance}}"),
            steps=((0.7, AMBER), (0.9, RED)),
            width=6,
        ),
        lines(
            "Memory",
            "Resident memory, and request bodies held of it.",
            "bytes",
            Query(f"max by (instance) ({ours('process_resident_memory_bytes')})", "{{instance}}"),
            Query(f"max by (instance) ({ours('warmroute_body_bytes')})", "{{instance}} bodies"),
            width=6,
        ),
        lines(
            "Connections",
            "Open connections of clients and to replicas, idle ones included.",
            "short",
            Query(f"sum ({ours('warmroute_connections')})", "clients"),
            Query(f"sum ({on_replica('warmroute_upstream_connections')})", "replicas"),
            width=6,
        ),
        number(
            "Version",
            "What runs. Several while an upgrade is under way.",
            "short",
            Query(f"count by (version) ({ours('warmroute_build_info')})", "{{version}}"),
            text=True,
        ),
        number(
            "Configuration in force for",
            "Time since the configuration in force was read.",
            "s",
            Query(f"time() - min ({ours('warmroute_config_applied_timestamp_seconds')})"),
        ),
        number(
            "Configuration refused",
            "Routers whose last reload was refused; an older configuration goes on. The log names the key.",
            "short",
            Query(f"count ({ours('warmroute_config_in_force')}) - sum ({ours('warmroute_config_in_force')})"),
            steps=((1, RED),),
        ),
        number(
            "Lines lost",
            "Lines of log and journal that were dropped in the last hour.",
            "short",
            Query(
                f"sum (increase({ours('warmroute_log_lines_dropped_total')}[1h])) + "
                f"sum (increase({ours('warmroute_journal_lines_dropped_total')}[1h]))"
            ),
            steps=((1, AMBER),),
            decimals=0,
        ),
        number(
            "Sessions remembered",
            "Of those that may be. Full, the one used least recently goes, and its next turn is placed as a new one.",
            "percentunit",
            Query(f"max ({ours('warmroute_sessions')} / {ours('warmroute_sessions_limit')})"),
            steps=((0.9, AMBER),),
            decimals=1,
        ),
        number(
            "Policy",
            "The policy in charge.",
            "short",
            Query("count by (policy) (" + ours("warmroute_policy_info", 'role="live"') + ")", "{{policy}}"),
            text=True,
        ),
    ]
