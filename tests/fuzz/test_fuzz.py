"""Thousands of cases in which clients, replicas and the network do as they like; `make fuzz` runs as many as wanted."""

from __future__ import annotations

import pytest

from tests.fuzz import case, oracle
from tests.fuzz.oracle import Asked, Finding, Relay

CASES = 4_000
BLOCK = 500


@pytest.mark.parametrize("first", range(0, CASES, BLOCK))
def test_nothing_that_anybody_sends_breaks_what_must_hold(first: int) -> None:
    """No error in a callback, no wait without end, nothing left open or held; what reaches a replica was sent, what
    reaches a client was said by its replica, whole when it is told to be whole."""
    answers = 0
    for number in range(first, first + BLOCK):
        try:
            answers += case.run(number)
        except Exception as error:
            raise AssertionError(f"case {number}: python -m tests.fuzz {number}") from error
    assert answers > BLOCK, "most cases come as far as answers"


GET = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"
SAID = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
TOLD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-warmroute-replica: a\r\n\r\nhi"


def check(
    client: bytes = GET, target: bytes = b"/a", said: bytes = SAID, out: bytes = TOLD, ended: bool = False
) -> int:
    relay = Relay(Asked(b"GET", target, [], b""), bytearray(said), ended=ended)
    return oracle.check(client, [relay], out, closed=True, aborted=False, strict=True)


def test_the_oracle_lets_proper_traffic_pass() -> None:
    assert check() == 1


def test_of_two_equal_requests_the_oracle_takes_the_one_that_was_relayed() -> None:
    refused = b"HTTP/1.1 503 Off\r\nContent-Length: 2\r\nx-warmroute-reason: x\r\nx-request-id: 1\r\n\r\n{}"
    told = TOLD.replace(b"\r\n\r\n", b"\r\nx-request-id: 2\r\n\r\n")
    relay = Relay(Asked(b"GET", b"/a", [], b"", identifier=b"2"), bytearray(SAID))
    assert oracle.check(GET + GET, [relay], refused + told, closed=True, aborted=False, strict=False) == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"target": b"/b"}, "relayed what was not sent"),
        ({"client": GET[:-2]}, "relayed what was not sent"),
        ({"out": TOLD.replace(b"hi", b"ho")}, "another body"),
        ({"out": TOLD.replace(b"200", b"201")}, "status 201"),
        ({"out": TOLD[:-1]}, "incomplete though nobody failed"),
        ({"out": TOLD + SAID}, "neither a replica's answer nor a refusal"),
        ({"out": SAID}, "neither a replica's answer nor a refusal"),
        ({"out": b"\x00" + TOLD}, "cannot read"),
        ({"said": SAID[:-1]}, "half an answer is taken for whole"),
        ({"said": SAID.replace(b"2\r\n\r\n", b"9\r\n\r\n"), "ended": True}, "half an answer is taken for whole"),
    ],
)
def test_the_oracle_sees_what_is_wrong(wrong: dict[str, bytes], why: str) -> None:
    with pytest.raises(Finding, match=why):
        check(**wrong)  # type: ignore[arg-type]
