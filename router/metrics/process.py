"""The router's own state. Rows of the table. Memory, CPU, open files and garbage collection are told by
prometheus-client's `process_*` and `python_*`."""

from __future__ import annotations

import platform

from router.metrics import labels as of
from router.metrics.family import Family, Merge, counts, one
from router.version import VERSION

ROWS = (
    Family(
        "warmroute_build_info",
        "gauge",
        "1",
        (of.VERSION, of.PYTHON),
        "What runs.",
        lambda _, __: [((VERSION, platform.python_version()), 1.0)],
        Merge.MAX,
    ),
    Family(
        "warmroute_workers",
        "gauge",
        "processes",
        (),
        "Processes that serve, a core each; more than one with `--workers`.",
        one(lambda _: 1.0),
    ),
    Family(
        "warmroute_config_reloads_total",
        "counter",
        "reloads",
        (of.RESULT,),
        "Times the configuration was read anew.",
        counts(lambda m: {(result,): n for result, n in m.reloads.items()}, of.RESULT.values or ()),
    ),
    Family(
        "warmroute_config_in_force",
        "gauge",
        "1",
        (),
        "1 when the configuration last read is in force; 0 when it was refused, and an older one is.",
        one(lambda m: float(m.config_in_force)),
        Merge.MIN,
    ),
    Family(
        "warmroute_config_applied_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "When the configuration in force was put there, since the epoch.",
        one(lambda m: m.config_applied_at),
        Merge.MAX,
    ),
    Family(
        "warmroute_loop_lag_seconds",
        "histogram",
        "seconds",
        (),
        "How late a timer came that is due ten times a second.",
        one(lambda m: m.heartbeat.lateness),
    ),
    Family(
        "warmroute_loop_lag_max_seconds",
        "gauge",
        "seconds",
        (),
        "The most it was late in the last 30 to 60 s.",
        one(lambda m: m.heartbeat.max_s),
        Merge.MAX,
    ),
    Family(
        "warmroute_connections",
        "gauge",
        "connections",
        (),
        "Open client connections.",
        one(lambda m: None if m.proxy is None else m.proxy.connections),
        Merge.SUM,
    ),
    Family(
        "warmroute_connections_limit",
        "gauge",
        "connections",
        (),
        "Client connections at most.",
        one(lambda m: None if m.proxy is None else m.proxy.limits.connections),
        Merge.SUM,
    ),
    Family(
        "warmroute_body_bytes",
        "gauge",
        "bytes",
        (),
        "Request bodies held.",
        one(lambda m: None if m.proxy is None else m.proxy.body_bytes),
        Merge.SUM,
    ),
    Family(
        "warmroute_body_limit_bytes",
        "gauge",
        "bytes",
        (),
        "Request bodies held at most.",
        one(lambda m: None if m.proxy is None else m.proxy.limits.body_memory_bytes),
        Merge.SUM,
    ),
    Family(
        "warmroute_log_lines_dropped_total",
        "counter",
        "lines",
        (),
        "Lines of the log that nobody took in time.",
        one(lambda m: None if m.proxy is None else m.proxy.access_log.dropped),
    ),
    Family(
        "warmroute_journal_lines_dropped_total",
        "counter",
        "lines",
        (),
        "Lines of the journal that the disk did not take in time.",
        one(lambda m: 0 if m.journal is None else m.journal.dropped),
    ),
)
