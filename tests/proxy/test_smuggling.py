"""Requests that two readers could understand differently: refused, closed, and nothing of them reaches a replica."""

from __future__ import annotations

import pytest

from tests.fakes.client import get
from tests.fakes.upstream import always, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm


def request(*lines: str, first: str = "POST /v1/x HTTP/1.1", body: str = "") -> bytes:
    return "\r\n".join([first, "Host: a", *lines, "", body]).encode("latin-1")


CHUNKED = "Transfer-Encoding: chunked"
END = "0\r\n\r\n"

FORMS = {
    "both lengths": request(CHUNKED, "Content-Length: 5", body=END),
    "both lengths, other order": request("Content-Length: 5", CHUNKED, body=END),
    "two equal lengths": request("Content-Length: 5", "Content-Length: 5", body="hello"),
    "two lengths": request("Content-Length: 5", "Content-Length: 6", body="hello"),
    "list of lengths": request("Content-Length: 5, 5", body="hello"),
    "signed length": request("Content-Length: +5", body="hello"),
    "negative length": request("Content-Length: -5", body="hello"),
    "hex length": request("Content-Length: 0x5", body="hello"),
    "length with letters": request("Content-Length: 5a", body="hello"),
    "length in two": request("Content-Length: 5 5", body="hello"),
    "empty length": request("Content-Length:", body="hello"),
    "length overflow": request("Content-Length: 18446744073709551617", body="h"),
    "bare LF after a header": b"POST / HTTP/1.1\r\nHost: a\nContent-Length: 0\r\n\r\n",
    "bare LF after the first line": b"POST / HTTP/1.1\nHost: a\r\nContent-Length: 0\r\n\r\n",
    "bare LF everywhere": b"POST / HTTP/1.1\nHost: a\nContent-Length: 0\n\n",
    "bare LF at the head's end": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\n",
    "bare CR in a value": request("X: a\rContent-Length: 5"),
    "bare CR after the first line": b"POST / HTTP/1.1\rHost: a\r\n\r\n",
    "folded header": request("X: a", " b"),
    "folded length": request("Content-Length:", " 5", body="hello"),
    "folded with a tab": request("X: a", "\tb"),
    "folded first header": b"POST / HTTP/1.1\r\n Host: a\r\nHost: b\r\n\r\n",
    "NUL in a value": request("X: a\x00b"),
    "NUL in a name": request("X\x00: a"),
    "NUL in the target": b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    "control in a name": request("X\x01: a"),
    "space before the colon": request("Content-Length : 5", body="hello"),
    "tab before the colon": request("Transfer-Encoding\t: chunked", body=END),
    "space in a name": request("Content Length: 5"),
    "no colon": request("Content-Length 5"),
    "no name": request(": 5"),
    "coding in list": request("Transfer-Encoding: gzip, chunked", body=END),
    "coding twice in list": request("Transfer-Encoding: chunked, chunked", body=END),
    "coding twice": request(CHUNKED, CHUNKED, body=END),
    "coding and identity": request(CHUNKED, "Transfer-Encoding: identity", body=END),
    "identity": request("Transfer-Encoding: identity"),
    "coding not last": request("Transfer-Encoding: chunked, gzip", body=END),
    "coding with a letter before": request("Transfer-Encoding: xchunked", body=END),
    "coding with a letter behind": request("Transfer-Encoding: chunkedx", body=END),
    "coding with vertical tab": request("Transfer-Encoding: \x0bchunked", body=END),
    "coding quoted": request('Transfer-Encoding: "chunked"', body=END),
    "coding with parameter": request("Transfer-Encoding: chunked;q=1", body=END),
    "chunks in HTTP/1.0": request(CHUNKED, first="POST / HTTP/1.0", body=END),
    "empty coding": request("Transfer-Encoding:", body=END),
    "empty member": request("Transfer-Encoding: ,chunked", body=END),
    "chunk size signed": request(CHUNKED, body="+5\r\nhello\r\n" + END),
    "chunk size negative": request(CHUNKED, body="-5\r\nhello\r\n" + END),
    "chunk size with prefix": request(CHUNKED, body="0x5\r\nhello\r\n" + END),
    "chunk size not hex": request(CHUNKED, body="5g\r\nhello\r\n" + END),
    "chunk size empty": request(CHUNKED, body="\r\nhello\r\n" + END),
    "chunk size spaced before": request(CHUNKED, body=" 5\r\nhello\r\n" + END),
    "chunk size spaced behind": request(CHUNKED, body="5 \r\nhello\r\n" + END),
    "chunk size overflow": request(CHUNKED, body="10000000000000005\r\nhello\r\n" + END),
    "chunk size ended by LF": request(CHUNKED, body="5\nhello\r\n" + END),
    "chunk ended by LF": request(CHUNKED, body="5\r\nhello\n" + END),
    "chunk ended by nothing": request(CHUNKED, body="5\r\nhello" + END),
    "chunk longer than its size": request(CHUNKED, body="5\r\nhello!\r\n" + END),
    "chunk shorter than its size": request(CHUNKED, body="6\r\nhello\r\n" + END),
    "extension with LF": request(CHUNKED, body="5;a\nb\r\nhello\r\n" + END),
    "extension with LF in its value": request(CHUNKED, body="5;a=b\nc\r\nhello\r\n" + END),
    "extension with LF in quotes": request(CHUNKED, body='5;a="b\nc"\r\nhello\r\n' + END),
    "extension with CR": request(CHUNKED, body="5;a\rX\r\nhello\r\n" + END),
    "last chunk ended by LF": request(CHUNKED, body="0\n\r\n"),
    "trailers ended by LF": request(CHUNKED, body="0\r\n\n"),
    "trailer with bare LF": request(CHUNKED, body="0\r\nX: a\nY: b\r\n\r\n"),
    "trailer with space before the colon": request(CHUNKED, body="0\r\nX : a\r\n\r\n"),
    "length in the trailers": request(CHUNKED, body="0\r\nContent-Length: 5\r\n\r\nhello"),
    "two hosts": request("Host: b"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "version 2": request(first="GET / HTTP/2.0"),
    "version 0.9": request(first="GET / HTTP/0.9"),
    "version 1.2": request(first="GET / HTTP/1.2"),
    "version 3.1": request(first="GET / HTTP/3.1"),
    "no version": b"GET /\r\n\r\n",
    "strange version": request(first="GET / HTTP/1.1x"),
    "other protocol": request(first="GET / HTTQ/1.1"),
    "lower case protocol": request(first="GET / http/1.1"),
    "space in the target": request(first="GET /a b HTTP/1.1"),
    "line feed in the target": b"GET /a\nb HTTP/1.1\r\nHost: a\r\n\r\n",
    "no target": request(first="GET HTTP/1.1"),
    "lower case method": request(first="get / HTTP/1.1"),
    "unknown method": request(first="HELLO / HTTP/1.1"),
    "method with a colon": request(first="GET: / HTTP/1.1"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "an answer": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "nothing of HTTP": b"\x00\x00\x00\x00hello\r\n\r\n",
}


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", FORMS)
async def test_is_refused_and_closed(warm: Warm, name: str, size: int) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    smuggled = get("/smuggled")
    await client.drip(FORMS[name] + smuggled, size)
    answer, rest = await client.refused()
    assert answer.status == (505 if name in ("version 2", "version 0.9", "no version") else 400)
    assert answer.header("connection") == "close"
    assert rest == b""
    client.close()
    await eventually(lambda: not router.proxy.downstreams)
    assert not router.upstreams[0].connections


@pytest.mark.parametrize("name", FORMS)
async def test_is_refused_in_its_turn(warm: Warm, name: str) -> None:
    router = await warm(always(ok(b"first")))
    client = await router.client()
    client.send(get("/first") + FORMS[name] + get("/smuggled"))
    assert (await client.answer()).body == b"first"
    answer, rest = await client.refused()
    assert answer.status in (400, 505)
    assert rest == b""
    assert [request.target for request in router.upstreams[0].requests] == ["/first"]


@pytest.mark.parametrize(
    "body",
    ["5\r\nhello\r\n0\r\n\r\n", "05;a=b\r\nhello\r\n000;c\r\nX: y\r\n\r\n", '5;a="b;c"\r\nhello\r\n0\r\n\r\n'],
)
async def test_proper_chunks_are_no_smuggling(warm: Warm, body: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    for _ in range(2):
        assert (await client.ask(request("transfer-encoding:  Chunked ", body=body))).status == 200
    assert [each.body for each in router.upstreams[0].requests] == [b"hello"] * 2
