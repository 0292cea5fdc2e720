"""An overview as lines and tables for a terminal of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from router import units
from router.top.feed import Seen

STYLES = {"ok": "", "warn": "yellow", "bad": "bold red"}

MIN_DECISIONS = 3
"""Lines of decisions kept on a small screen, which else the replicas would fill."""


class _Column(NamedTuple):
    """A column of the table of replicas."""

    name: str
    from_width: int
    """Columns of the terminal from which on it is shown."""
    cell: Callable[[dict[str, Any]], str]
    justify: Literal["left", "right"] = "right"
    whole: bool = True
    """Never cut; else it gives way where there is no room."""


COLUMNS = (
    _Column("REPLICA", 0, lambda each: units.short(each["id"]), "left", whole=False),
    _Column("POOL", 60, lambda each: each["pool"] or "", "left", whole=False),
    _Column("STATE", 0, lambda each: state(each), "left"),
    _Column("IN FLIGHT", 0, lambda each: str(each["in_flight"])),
    _Column("WAIT", 0, lambda each: units.seconds(each["expected_wait_s"])),
    _Column("OTHERS", 90, lambda each: str(each["others_in_flight"])),
    _Column("TO PREFILL", 60, lambda each: f"{units.tokens(each['pending_prefill_tokens'])} tok"),
    _Column("KV", 50, lambda each: _share(each["resident_tokens"], each["capacity_tokens"])),
    _Column("OF", 90, lambda each: f"{units.tokens(each['capacity_tokens'])} tok"),
    _Column("CONVERSATIONS", 110, lambda each: str(each["conversations"])),
    _Column("HIT RATE", 75, lambda each: "-" if each["hit_rate"] is None else units.percent(each["hit_rate"])),
    _Column("WHY", 100, lambda each: why(each), "left", whole=False),
)


class Screen:
    """What was seen, drawn to the size of the console that asks. `height` 0: as long as it gets."""

    def __init__(self, seen: Seen, sort: str, height: int = 0, keys: str = "") -> None:
        self._seen = seen
        self._sort = sort
        self._height = height
        self._keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, told = self._seen, self._seen.overview
        head: list[Text] = []
        if seen.trouble:
            since = f"unreachable since {seen.since:%H:%M:%S} UTC: " if seen.since else ""
            head.append(line(f"{since}{seen.trouble}", STYLES["bad"], wrap=True))
        if told is not None:
            head += _head(told)
        yield from head
        if told is None:
            return
        replicas, decisions = told["replicas"], told["decisions"]
        if self._height:
            used = sum(len(text.wrap(console, options.max_width)) for text in head)
            room = self._height - used - len(("", "REPLICA", "more", "DECISIONS", self._keys))
            rows = min(len(replicas), max(1, room - MIN_DECISIONS))
            replicas, decisions = replicas[:rows], decisions[: max(0, room - rows)]
        yield line("")
        yield _replicas(replicas, options.max_width)
        hidden = told["found"] - len(replicas)
        yield line(f"{hidden} more, by {self._sort}" if hidden else "", "dim")
        if decisions:
            yield line("DECISIONS", "bold")
        yield from (_decision(each) for each in decisions)
        if self._keys:
            yield line(self._keys, "dim")


def _head(told: dict[str, Any]) -> Iterator[Text]:
    verdict, fleet, shadow = told["verdict"], told["fleet"], told["shadow"]
    title = line(verdict["text"], STYLES[verdict["level"]] or "green", wrap=True)
    title.append(f"  {units.clock(told['time'])} UTC, up {units.duration(told['uptime_s'])}", "dim")
    yield title
    rate, hit, wait = fleet["requests_per_s"], fleet["hit_rate"], fleet["longest_wait_s"]
    figures = [
        f"{rate or 0:.1f} requests/s",
        f"{fleet['in_flight']} in flight",
        f"{fleet['waiting']} waiting",
        f"{fleet['awaiting_first_token']} before their first token",
        f"{units.tokens(fleet['pending_prefill_tokens'])} tokens to prefill",
        f"longest wait {'unknown' if wait is None else units.seconds(wait)}",
        f"hit rate {'none yet' if hit is None else units.percent(hit)}",
        f"KV {units.tokens(fleet['resident_tokens'])} of {units.tokens(fleet['capacity_tokens'])} tokens",
        units.counted(fleet["sessions"], "session"),
        f"{units.tokens(sum(fleet['regretted_tokens'].values()))} tokens regretted",
        f"{units.counted(sum(fleet['refusals'].values()), 'request')} refused{_reasons(fleet['refusals'])}",
    ]
    yield line(", ".join(figures), wrap=True)
    policy = f"policy {told['policy']['name']}"
    if shadow and not shadow["fault"]:
        policy += f", in its shadow {shadow['name']}: same replica in {shadow['same_replica']} of {shadow['choices']}"
    elif shadow:
        policy += f", its shadow was ended by a fault: {shadow['fault']}"
    yield line(policy)
    if told["store"]:
        yield _store(told["store"])


def _store(store: dict[str, Any]) -> Text:
    claims, others = store["claims"], len(store["routers"])
    if not store["up"]:
        return line(
            f"store away: {store['why']}; {units.counted(store['untold'], 'home')} untold", STYLES["warn"], wrap=True
        )
    made = sum(claims.values()) - claims["not_asked"]
    figures = [
        f"{units.counted(others, 'other router')} heard",
        f"{claims['adopted']} of {units.counted(made, 'new session')} known elsewhere",
        f"{units.counted(claims['late'], 'claim')} late",
        f"{units.counted(store['untold'], 'home')} untold",
    ]
    return line(f"store up, {', '.join(figures)}")


def _reasons(refusals: dict[str, int]) -> str:
    return f" ({', '.join(f'{count} {reason}' for reason, count in refusals.items())})" if refusals else ""


def _replicas(replicas: list[dict[str, Any]], width: int) -> Table:
    pools = any(replica["pool"] for replica in replicas)
    columns = [column for column in COLUMNS if column.from_width <= width and (pools or column.name != "POOL")]
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False, header_style="bold")
    for column in columns:
        table.add_column(column.name, justify=column.justify, no_wrap=column.whole)
    for replica in replicas:
        table.add_row(*(line(column.cell(replica)) for column in columns), style=STYLES[replica["level"]])
    return table


def _decision(made: dict[str, Any]) -> Text:
    session = made["session"][:8] if made["session"] else "-" * 8
    style = "red" if made["failed"] or not made["replica"] else ""
    failed = f" (failed: {made['failed']})" if made["failed"] else ""
    text = line(f"{units.clock(made['time'])} {session} ", "dim")
    text.append(printable(f"{made['reason']:<12} {units.short(made['sentence'])}{failed}"), style)
    return text


def state(replica: dict[str, Any]) -> str:
    """In a word or two."""
    slow = f", {replica['slowness']:.1f} x slow" if replica["slowness"] > 1 else ""
    return f"{replica['label']}{slow}"


def why(replica: dict[str, Any]) -> str:
    """Of a replica that is not plainly ready, for how long it is so and why."""
    if not replica["remark"]:
        return ""
    since = "" if replica["since_s"] is None else f"{units.duration(replica['since_s'])}: "
    return f"{since}{replica['remark']}"


def line(text: str, style: str = "", *, wrap: bool = False) -> Text:
    """One line, cut at the right edge. Nothing in it is taken for markup or for the terminal's own commands."""
    return Text(printable(text), style, no_wrap=not wrap, overflow="fold" if wrap else "ellipsis", end="\n")


def printable(text: str) -> str:
    """Without control characters: a replica's words must not reach the terminal as commands."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _share(part: int, whole: int) -> str:
    return units.percent(part / whole) if whole else "-"
