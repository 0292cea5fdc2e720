"""Where Redis or Valkey is, as it is written in `store.url`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

EXAMPLES = (
    "redis://10.0.0.1:6379/0, rediss://... with TLS, unix:///run/redis.sock, "
    "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster/0 or redis+cluster://10.0.0.1:6379,10.0.0.2:6379"
)

_SCHEME = re.compile(r"(rediss?)(\+sentinel|\+cluster)?://(.*)", re.DOTALL)
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_UNIX = re.compile(r"unix://(/[^?#]+)(?:\?db=([0-9]+))?")
_MASTER = re.compile(r"[A-Za-z0-9._-]+")

LIKE = re.compile(
    r"unix:///[^?#]+(\?db=[0-9]+)?|rediss?(\+sentinel|\+cluster)?://[A-Za-z0-9._:,\[\]-]+(/[A-Za-z0-9._/-]*)?|.*@.*"
)
"""What `parse` takes, and more: also what holds an @, so that who goes by this does not show it."""

Kind = Literal["single", "unix", "sentinel", "cluster"]


@dataclass(frozen=True, slots=True)
class Address:
    """`hosts` are of one server, of Sentinels, or of some nodes of a cluster."""

    kind: Kind
    url: str
    """As it was written: it holds nothing secret."""
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    """Of a unix socket."""
    master: str = ""
    """Name by which Sentinels know it."""
    db: int = 0


def parse(url: str) -> Address:
    """Raises ValueError naming what is wrong; a password that was put into the URL is not shown."""
    if "@" in url:
        raise ValueError(
            "url (not shown here) holds a user or a password, or an @: "
            "leave it out and set store.username and store.password or store.password_file"
        )
    if url.startswith("unix:"):
        if not (unix := _UNIX.fullmatch(url)):
            raise ValueError(f"url {url!r} is not a socket's: write it as in unix:///run/redis.sock?db=0")
        return Address("unix", url, path=unix[1], db=int(unix[2] or 0))
    if not (parts := _SCHEME.fullmatch(url)):
        raise ValueError(f"url {url!r} is none of Redis: write it as in {EXAMPLES}")
    tls, kind = parts[1] == "rediss", parts[2].removeprefix("+") if parts[2] else "single"
    authority, *path = parts[3].removesuffix("/").split("/")
    hosts = tuple(_host(url, each, 26_379 if kind == "sentinel" else 6379) for each in authority.split(","))
    match kind, path:
        case "sentinel", [master, *db] if len(db) <= 1 and _MASTER.fullmatch(master):
            return Address("sentinel", url, tls, hosts, master=master, db=_db(url, db))
        case "sentinel", _:
            raise ValueError(f"url {url!r}: the master's name must follow: redis+sentinel://HOST:26379/mymaster/0")
        case "cluster", []:
            return Address("cluster", url, tls, hosts)
        case "cluster", _:
            raise ValueError(f"url {url!r}: a cluster has no databases: leave out what follows the hosts")
        case _, db if len(db) <= 1:
            if len(hosts) > 1:
                raise ValueError(f"url {url!r}: several hosts are Sentinels or a cluster: write it as in {EXAMPLES}")
            return Address("single", url, tls, hosts, db=_db(url, db))
    raise ValueError(f"url {url!r}: only a database's number may follow the host, as in redis://10.0.0.1:6379/0")


def _host(url: str, text: str, port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None or not 1 <= int(found[2] or port) <= 65_535:
        raise ValueError(f"url {url!r}: {text!r} is not a host with or without a port: write it as in {EXAMPLES}")
    return found[1].strip("[]"), int(found[2] or port)


def _db(url: str, path: list[str]) -> int:
    text = path[0] if path else "0"
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError(f"url {url!r}: {text!r} is not a database's number: write 0, or leave it out")
    return int(text)
