"""What must be true of any traffic, told by another parser (h11) than the router's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import h11

LIMIT_BYTES = 1 << 20
_INTERIMS = re.compile(rb"(?:[\r\n]*HTTP/1\.[01] 1(?!01)[0-9]{2}[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n)*[\r\n]*")
"""Interim answers, with empty lines around them, which llhttp skips and h11 does not."""


_FRAMING = "Transfer-Encoding"
_TRAILERS = "its trailers speak of framing"
"""What h11 makes of such trailers, which are dropped here: it reads no further."""


class Finding(AssertionError):
    """Something that must not happen has."""


@dataclass(slots=True)
class Asked:
    """A request as h11 reads it."""

    method: bytes
    target: bytes
    marked: list[bytes]
    """Values of its `x-fuzz` headers."""
    body: bytes
    sender: bytes = b""
    """Who the router says it is from; only at a replica."""
    identifier: bytes = b""
    """Its request id, the same at every replica that it is tried on."""


@dataclass(slots=True)
class Given:
    """An answer as h11 reads it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    complete: bool = False
    wrong: str = ""
    """Why h11 read no further, if it was not for want of bytes."""

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


def asked(request: h11.Request, body: bytes) -> Asked:
    named = {
        token.strip().lower() for key, value in request.headers if key == b"connection" for token in value.split(b",")
    }
    marked = [value for key, value in request.headers if key == b"x-fuzz"] if b"x-fuzz" not in named else []
    target = bytes(request.target)
    identifier = next((value for key, value in request.headers if key == b"x-request-id"), b"")
    senders = [value.rsplit(b", ", 1)[-1] for key, value in request.headers if key == b"x-forwarded-for"]
    return Asked(bytes(request.method), target, marked, body, senders[-1] if senders else b"", identifier)


def requests(raw: bytes) -> tuple[list[Asked], str]:
    """The whole requests in a client's bytes, and why h11 read no further."""
    found: list[Asked] = []
    # A server should skip empty lines before a request (RFC 9112, section 2.2); h11 does not.
    while raw := raw.lstrip(b"\r\n"):
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=LIMIT_BYTES)
        first, separator, rest = raw.partition(b"\r\n")
        reader.receive_data(re.sub(rb" {2,}", b" ", first) + separator + rest)  # llhttp takes many for one
        head, body = None, b""
        try:
            while not isinstance(event := reader.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return found, "incomplete"
        except h11.RemoteProtocolError as error:
            if head is not None and _FRAMING in str(error):
                return [*found, asked(head, body)], _TRAILERS
            return found, str(error)
        assert head is not None
        found.append(asked(head, body))
        raw = reader.trailing_data[0]
    return found, ""


def answers(raw: bytes, methods: list[bytes], *, ended: bool) -> tuple[list[Given], bytes]:
    """The answers in a stream of bytes, the last perhaps incomplete, and what follows when no method is left.

    `ended`: the connection was closed properly behind them.
    """
    found: list[Given] = []
    for method in methods:
        if not raw:
            break
        reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=LIMIT_BYTES)
        reader.send(h11.Request(method=method, target="/", headers=[("Host", "a"), ("Content-Length", "0")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(raw)
        if ended:
            reader.receive_data(b"")
        given = Given(0, [])
        try:
            while not isinstance(event := reader.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    given.status = event.status_code
                    given.headers = list(event.headers)
                elif isinstance(event, h11.Data):
                    given.body += bytes(event.data)
                elif not isinstance(event, h11.InformationalResponse):
                    found.append(given)  # more would be needed
                    return found, b""
        except h11.RemoteProtocolError as error:
            if given.status or "ConnectionClosed" not in str(error):  # else interim answers and no more
                given.wrong = str(error)
            found.append(given)
            return found, b""
        given.complete = True
        found.append(given)
        raw = reader.trailing_data[0]
        if given.header(b"x-warmroute-reason") == b"malformed" and method == b"HEAD":
            return found, b""  # what cannot be read is no HEAD yet: the refusal has a body
    return found, raw


@dataclass(slots=True)
class Relay:
    """A request that reached a replica, and what it was answered."""

    asked: Asked
    raw: bytearray = field(default_factory=bytearray)
    """What the replica sent from then on, until its connection was asked for something else."""
    ended: bool = False
    """The replica closed properly behind it."""
    excess_forbidden: bool = True
    """What it sent behind its answer must reach nobody."""


def match(sent: list[Asked], why: str, relays: list[Relay], got: list[Given]) -> dict[int, list[Relay]]:
    """Each relayed request is, in order, one that the client sent: where those went, by their number.

    `why` h11 read no further in what was sent. Of equal requests it is the one whose answer has its identifier. Raises
    Finding when h11 does not read such a request in the client's bytes.
    """
    tries: dict[int, list[Relay]] = {}
    at = 0
    for relay in relays:
        if at and _same(sent[at - 1], relay.asked) and tries[at - 1][0].asked.identifier == relay.asked.identifier:
            tries[at - 1].append(relay)
            continue
        identifier = relay.asked.identifier
        number = next(
            (n for n in range(at, len(sent)) if _same(sent[n], relay.asked) and _is_of(got[n : n + 1], identifier)),
            None,
        )
        if number is None and why == _TRAILERS:
            break
        if number is None:
            raise Finding(f"relayed what was not sent: {relay.asked}\nsent, as h11 reads it ({why}): {sent[at:]}")
        tries[number] = [relay]
        at = number + 1
    return tries


def _is_of(answer: list[Given], identifier: bytes) -> bool:
    """Whether it is the answer to that request, or may be."""
    return not answer or answer[0].header(b"x-request-id") in (None, identifier)


def _same(sent: Asked, relayed: Asked) -> bool:
    return (
        sent.method == relayed.method
        and sent.target == relayed.target
        and sent.body == relayed.body
        and sent.marked == relayed.marked
    )


def check(client: bytes, relays: list[Relay], out: bytes, *, closed: bool, aborted: bool, strict: bool) -> int:
    """What one client sent, what of it reached replicas and what they said, and what the client was written.

    `strict`: nobody lied, left or died, so that every request must have been answered whole.
    Returns how many answers it got. Raises Finding.
    """
    sent, why = requests(client)
    methods = [each.method for each in sent]
    got, rest = answers(out, [*methods, b"GET"], ended=closed and not aborted)
    if got and len(got) > len(sent) and not got[-1].complete and not got[-1].wrong:
        got, rest = answers(out, [*methods, b"HEAD"], ended=closed and not aborted)  # refused at its head
    tries = match(sent, why, relays, got)
    if rest:
        raise Finding(f"more is answered than was asked: {rest[:200]!r}")
    for number, given in enumerate(got):
        if given.wrong and "closed connection" not in given.wrong:
            raise Finding(f"h11 cannot read answer {number}: {given.wrong}")
        if given.status == 0:
            continue
        if given.header(b"x-warmroute-replica") is None:
            _check_refusal(given, methods[number] if number < len(methods) else b"")
            continue
        if number not in tries:
            raise Finding(f"answer {number} comes from a replica that was not asked")
        _check_relayed(given, tries[number][-1])
    if strict:
        complete = sum(given.complete for given in got)
        if complete < len(got):
            raise Finding("an answer is incomplete though nobody failed")
    return len(got)


def _check_refusal(given: Given, method: bytes) -> None:
    if given.header(b"x-warmroute-reason") is None:
        raise Finding(f"neither a replica's answer nor a refusal: {given}")
    if given.complete and given.body:
        json.loads(given.body)


def _check_relayed(given: Given, relay: Relay) -> None:
    """What the client got is what the replica said: whole where it is told to be whole, else its beginning."""
    raw = _INTERIMS.sub(b"", relay.raw, count=1)
    said = next(iter(answers(raw, [relay.asked.method], ended=relay.ended)[0]), Given(0, []))
    if said.status != given.status:
        raise Finding(f"status {given.status} where the replica said {said.status} ({said.wrong})")
    if given.complete:
        if not said.complete and not (_FRAMING in said.wrong and said.body):
            raise Finding(f"half an answer is taken for whole ({said.wrong}): {given} of {bytes(relay.raw)!r}")
        if said.body != given.body:
            raise Finding(f"another body than the replica sent: {given.body!r} for {said.body!r}")
    elif not said.body.startswith(given.body):
        raise Finding(f"not the beginning of what the replica sent: {given.body!r} for {said.body!r}")
    if relay.excess_forbidden and b"<excess>" in given.body:
        raise Finding("what follows an answer was taken for part of it")
