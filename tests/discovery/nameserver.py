"""A DNS server on 127.0.0.1, by UDP and TCP, that answers what it is told to."""

from __future__ import annotations

import asyncio
from typing import Literal

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.fakes.process import free_port

UDP_BYTES = 1232
"""What fits into a datagram; the rest is asked for by TCP."""


class Nameserver:
    """Of the records in `records`; whoever has none of any kind is not there."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        """By name and kind: seconds to live, and values as in a zone file."""
        self.fault: Literal["", "refuse", "fail", "hang", "garbage"] = ""
        self.asked: list[tuple[str, str]] = []
        self.by_tcp = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        port = free_port()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(self), ("127.0.0.1", port))
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        assert self._transport is not None
        assert self._server is not None
        self._transport.close()
        self._server.close()
        await self._server.wait_closed()

    def give(self, name: str, kind: str, *values: str, ttl_s: int = 0) -> None:
        """These are its records of that kind from now on; without any it has no such."""
        self.records[f"{name}.", kind] = (ttl_s, list(values))

    def send(self, wire: bytes, to: tuple[str, int]) -> None:
        """A datagram."""
        assert self._transport is not None
        self._transport.sendto(wire, to)

    def answer(self, data: bytes, most_bytes: int) -> bytes | None:
        """What is sent back; None for nothing."""
        question = dns.message.from_wire(data)
        (asked,) = question.question
        name, kind = asked.name.to_text().lower(), dns.rdatatype.to_text(asked.rdtype)
        self.asked.append((name, kind))
        if self.fault == "hang":
            return None
        if self.fault == "garbage":
            return data[:2] + b"\xff" * 20
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        alias = self.records.get((name, "CNAME"), (0, []))[1]
        if alias:
            answer.answer.append(dns.rrset.from_text(asked.name, 0, "IN", "CNAME", *alias))
            (name,) = alias
        ttl_s, values = self.records.get((name, kind), (0, []))
        if self.fault:
            answer.set_rcode(dns.rcode.SERVFAIL if self.fault == "fail" else dns.rcode.REFUSED)
        elif values:
            answer.answer.append(dns.rrset.from_text(name, ttl_s, "IN", kind, *values))
        elif not any(values for (known, _), (_, values) in self.records.items() if known == name):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        wire = answer.to_wire(max_size=65_535)
        if len(wire) > most_bytes:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
            wire = answer.to_wire()
        return wire

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.by_tcp += 1
        size = int.from_bytes(await reader.readexactly(2), "big")
        wire = self.answer(await reader.readexactly(size), 65_535)
        if wire is not None:
            writer.write(len(wire).to_bytes(2, "big") + wire)
        writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: Nameserver) -> None:
        self._server = server

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if (wire := self._server.answer(data, UDP_BYTES)) is not None:
            self._server.send(wire, addr)
