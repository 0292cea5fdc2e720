"""What a lease leaves behind: homes in the directory, and what was learned from its answer."""

from __future__ import annotations

from policies.directory import Branch, Directory, links, shared
from policies.lease import Lease
from policies.lookup import Found
from policies.residency import Home
from policies.speed import unit_prefill_s
from policies.types import Replica, Usage


def place(lease: Lease, directory: Directory, found: Found, now: float) -> None:
    """Note in the directory and in the replica's shadow that the prompt is being computed there."""
    request, replica = lease.request, lease.replica
    assert request.key is not None
    branch = found.branch
    if branch is None or found.forks:
        fork = Branch(request.key, request.fingerprint, found.chain, now)
        if branch is not None:
            fork.fork = request.concurrent
            fork.ratio, fork.fingerprint = branch.ratio, request.fingerprint or branch.fingerprint
        branch = fork
    else:
        branch.chain = found.chain or branch.chain
        branch.fingerprint = branch.fingerprint or request.fingerprint
    branch.open += 1
    directory.put(branch, now)
    lease.branch = branch
    for holder in found.holders.values():
        if holder.replica is replica:
            lease.believed = holder.tokens
        elif holder.tokens > lease.elsewhere:
            lease.elsewhere = holder.tokens
    lease.home = home = branch.lead(replica, now)
    lease.was_tokens, lease.was_whole = home.tokens, home.whole
    lease.used_at = home.last_use
    tokens = request.prompt_tokens if request.prompt_tokens > 0 else home.tokens
    related = len(found.branches) > 1 or found.branch is not branch
    doubled = _doubled(branch, home, found) if related else 0
    if related or branch.open > 1:
        lease.share(_shared(branch, found, replica))
    replica.cache.touch(home, tokens, tokens - doubled if tokens > doubled else 0, now)


def _shared(branch: Branch, found: Found, replica: Replica) -> int:
    """Tokens of its prompt's beginning that requests under way on the same replica hold already."""
    most = 0
    for other in found.branches:
        if other.open > (other is branch) and (twin := other.home_on(replica)) is not None:
            most = max(most, _common(twin, other, found))
    return most


def _common(twin: Home, other: Branch, found: Found) -> int:
    """Tokens that a prompt has in common with another branch's home, by the blocks that both begin with."""
    if found.chain and other.chain:
        return twin.tokens * shared(other.chain, found.chain) // max(1, links(other.chain))
    return twin.tokens


def _doubled(branch: Branch, home: Home, found: Found) -> int:
    """Tokens of its prompt's beginning that other branches' homes on the same replica take room for already."""
    counted = []
    for other in found.branches:
        if other is not branch and (twin := other.home_on(home.replica)) is not None:
            counted.append((twin.tokens - twin.counted, _common(twin, other, found)))
    # Each counts its end. What none of them counts must be counted here: the beginning that all share.
    doubled = 0
    for start, end in sorted(counted):
        if start > doubled:
            break
        doubled = max(doubled, end)
    return doubled


def settle(lease: Lease, directory: Directory, usage: Usage | None, now: float) -> None:
    """Note what is resident after a turn. Not for a replica that has left the fleet."""
    request, branch, home = lease.request, lease.branch, lease.home
    assert branch is not None
    assert home is not None
    if usage is not None and usage.prompt_tokens:
        tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
        if request.estimate_tokens > 0:
            branch.ratio = min(max(usage.prompt_tokens / request.estimate_tokens, 0.1), 10.0)
    elif lease.begun and request.prompt_tokens > 0:  # it answered: it holds the prompt
        tokens = request.prompt_tokens
    elif home.last_use > lease.opened_at:  # another router's turn was there meanwhile, and knows better
        tokens = home.tokens
    else:  # nothing shows that anything was computed
        tokens = lease.was_tokens if lease.opened_at >= lease.replica.since else 0
    cache = lease.replica.cache
    if not directory.holds(branch):
        cache.forget(home)
    elif tokens > 0:
        doubled = home.tokens - home.counted if home.tokens > home.counted else 0
        cache.touch(home, tokens, tokens - doubled if tokens > doubled else 0, now)
        directory.put(branch, now)
    else:
        cache.forget(home)
        if home in branch.homes:
            branch.homes.remove(home)


def compare(lease: Lease, usage: Usage | None) -> None:
    """The seconds to the first token with those expected: of what was to be computed as the answer's usage tells it,
    where it does, since a cache that had forgotten the prompt is not slow."""
    began, replica, choice = lease.first_token_at, lease.replica, lease.choice
    if began is None or not lease.timed or lease.request.prompt_tokens <= 0:
        return
    prefill_s = choice.prefill_s / lease.slowness
    if usage is not None and usage.prompt_tokens and usage.cached_tokens is not None and replica.reports_cached:
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        prefill_s = replica.speed.factor * unit_prefill_s(usage.prompt_tokens - cached, cached)
    replica.speed.lag.observe(choice.wait_s / lease.slowness + prefill_s, began - lease.opened_at, began)


def learn(lease: Lease, usage: Usage, prompt: int, now: float) -> None:
    """From an answer's usage, `prompt` tokens of prompt among it: the replica's speed and capacity."""
    replica, speed, cached = lease.replica, lease.replica.speed, usage.cached_tokens
    if cached:
        replica.reports_cached = True
    began = lease.first_token_at if lease.timed else None
    if cached is not None and replica.reports_cached:
        cached = min(cached, prompt)
        if lease.alone and began is not None:
            speed.observe_prefill(prompt - cached, cached, began - lease.opened_at)
        if lease.home is not None:
            replica.cache.correct(
                lease.home, lease.used_at, min(lease.believed, prompt), cached, min(lease.was_whole, prompt)
            )
    if began is not None and usage.completion_tokens:
        speed.observe_decode(
            usage.completion_tokens,
            (lease.batch + replica.in_flight + 1) / 2.0,
            replica.prefilled_s - lease.prefilled_s,
            now - began,
        )
