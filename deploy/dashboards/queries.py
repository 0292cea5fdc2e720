"""PromQL in short. Names in it are checked by tests that run every query."""

from __future__ import annotations

from dataclasses import dataclass

ROUTER = 'job=~"$job", instance=~"$instance"'
ENGINE = 'job=~"$engine"'


@dataclass(frozen=True, slots=True)
class Query:
    """A query and how its series are called."""

    expr: str
    legend: str = ""


def ours(name: str, more: str = "") -> str:
    """A family of the routers chosen."""
    return f"{name}{{{ROUTER}{', ' + more if more else ''}}}"


def on_replica(name: str, more: str = "") -> str:
    """The same of the replicas chosen. Several routers tell of each replica: aggregate by it."""
    return ours(name, 'replica=~"$replica"' + (", " + more if more else ""))


def engine(name: str, more: str = "") -> str:
    """A family of the engines."""
    return f"sglang:{name}{{{ENGINE}{', ' + more if more else ''}}}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def total(selector: str, by: str = "") -> str:
    """Sum of rates."""
    return f"sum{f' by ({by})' if by else ''} ({rate(selector)})"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """Of a histogram's name."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rate(ours(histogram + '_bucket'))}))"


def within(histogram: str, bound: str) -> str:
    """Share of what was observed within a bound, which must be one of the histogram's."""
    below = rate(ours(histogram + "_bucket", f'le="{bound}"'))
    return f"sum ({below}) / sum ({rate(ours(histogram + '_count'))})"


def of_capacity(name: str, by: str = "") -> str:
    """Tokens of a family over what fits. Each router counts its own sessions, and knows the capacity of all."""
    group = f" by ({by})" if by else ""
    capacity = f"max by (replica) ({on_replica('warmroute_capacity_tokens')})"
    return f"sum{group} ({on_replica(name)}) / sum{group} ({capacity})"


FAILED = 'cause=~"upstream|timeout|router"'
"""Requests that the service failed: not those that clients ended or got wrong."""


def failed_share(window: str = "$__rate_interval") -> str:
    """Share of requests that the service failed, over a window."""
    failed = f"sum (rate({ours('warmroute_requests_total', FAILED)}[{window}]))"
    judged = ours("warmroute_requests_total", 'cause!="client"')
    return f"{failed} / sum (rate({judged}[{window}]))"
