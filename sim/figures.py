"""What the figures of a run are called and mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One key of `Measure.result` as people read it."""

    key: str
    title: str
    """With its unit."""
    meaning: str
    always: bool = True
    """Shown even when it is 0 in every run."""
    beside: str = ""
    """Shown only when it differs, in any run, from the figure of this key."""


FIGURES = (
    Figure("requests", "requests", "Requests that were sent while it was measured."),
    Figure("ttft_p50_s", "TTFT p50, s", "Time to first token, median. What has none yet counts with its age."),
    Figure("ttft_p99_s", "TTFT p99, s", "Its 99th percentile."),
    Figure(
        "ttft_placed_p99_s",
        "TTFT p99 from placing, s",
        "The same from when a replica was picked, without the wait to be let in.",
        beside="ttft_p99_s",
    ),
    Figure(
        "excess_mean_s",
        "excess TTFT, mean, s",
        "Time to first token beyond that of an idle replica that holds all that was ever computed of the prompt: the "
        "part that placing is to blame for.",
    ),
    Figure("tpot_p99_s", "TPOT p99, s", "Time per output token after the first, 99th percentile of requests."),
    Figure("tokens_per_s", "tokens/s", "Prompt and output tokens of the requests that ended, cached ones included."),
    Figure("hit_gpu", "hit rate, GPU", "Share of prompt tokens that were in GPU memory."),
    Figure("hit_total", "hit rate, both tiers", "Share of prompt tokens that were in GPU memory or in the host tier."),
    Figure(
        "regretted_prefill_share",
        "computed again, was elsewhere",
        "Share of prompt tokens that were computed although another replica had them.",
    ),
    Figure(
        "evicted_prefill_share",
        "computed again, was evicted",
        "Share of prompt tokens that were computed again after no replica had them any more.",
    ),
    Figure(
        "inflight_max_over_mean",
        "in flight, fullest / mean",
        "Requests in flight on the fullest replica over the mean, in windows of 30 s, averaged.",
    ),
    Figure(
        "inflight_dispersion",
        "in flight, variance / mean",
        "Variance of requests in flight over replicas, divided by their mean: 1 is chance, 0 is even.",
    ),
    Figure("moved_share", "turns that moved", "Share of main threads' turns that went elsewhere than the one before."),
    Figure(
        "kv_lost_moves",
        "KV lost at scale-out, sessions",
        "First turns after a scale-out that went where less than half of what was resident is.",
        always=False,
    ),
    Figure("kv_lost_moves_to_new", "of those, to a new replica", "Of those, the ones sent to a new one.", always=False),
    Figure("sheds", "refused by admission", "Times that a client was told to come again later.", always=False),
    Figure(
        "let_in_longest_s",
        "longest wait to be let in, s",
        "Of a request, its client's coming again included; of one that still waits, its age.",
        always=False,
    ),
    Figure(
        "sessions_served_share",
        "sessions served",
        "Share of the sessions that were there of which a request was placed while it was measured.",
        beside="sessions_fairness",
    ),
    Figure(
        "sessions_fairness",
        "fairness between sessions",
        "Jain's index of the share of its time that a session was not kept waiting to be let in: 1 is equal.",
        beside="sessions_served_share",
    ),
    Figure("gate_exchanges", "places exchanged", "Sessions sent back for one that had waited for long.", always=False),
    Figure("gate_sent_back", "sessions sent back", "Sessions sent back as the fleet drowned.", always=False),
    Figure("unserved", "unserved at the end", "Requests that had no first token when the run ended.", always=False),
    Figure("broken", "answers broken off", "Answers that a crash has ended in the middle.", always=False),
    Figure("refused", "refused", "Requests that found no replica and were sent again.", always=False),
    Figure("abandoned", "clients that gave up", "Requests whose client left before a first token.", always=False),
    Figure(
        "retracted",
        "retracted for want of KV",
        "Requests taken out of a running batch because KV memory ran out.",
        always=False,
    ),
)
