"""How a store is named: what is read of a URL, and what is refused and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from router.configuration import ConfigError, load, masked
from router.settings import Settings, StoreSettings
from router.store.address import Address, parse
from router.store.faults import ACL, ACL_CLUSTER
from router.store.opening import store_of
from router.store.redis import RedisStore

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("redis://h", {"kind": "single", "hosts": (("h", 6379),)}),
        ("redis://10.0.0.1:7000/3", {"kind": "single", "hosts": (("10.0.0.1", 7000),), "db": 3}),
        ("rediss://[::1]:7000/", {"kind": "single", "hosts": (("::1", 7000),), "tls": True}),
        ("unix:///run/redis.sock", {"kind": "unix", "path": "/run/redis.sock"}),
        ("unix:///run/r?db=2", {"kind": "unix", "path": "/run/r", "db": 2}),
        (
            "redis+sentinel://a,b:7/mymaster",
            {"kind": "sentinel", "hosts": (("a", 26379), ("b", 7)), "master": "mymaster"},
        ),
        (
            "rediss+sentinel://a/m/4",
            {"kind": "sentinel", "hosts": (("a", 26379),), "master": "m", "db": 4, "tls": True},
        ),
        ("redis+cluster://a,[::2]:7", {"kind": "cluster", "hosts": (("a", 6379), ("::2", 7))}),
    ],
)
def test_urls(url: str, read: dict[str, Any]) -> None:
    assert parse(url) == Address(url=url, **read)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("h:6379", "is none of Redis"),
        ("http://h", "is none of Redis"),
        ("valkey://h", "is none of Redis"),
        ("redis://", "'' is not a host"),
        ("redis://h:0", "'h:0' is not a host"),
        ("redis://h:65536", "'h:65536' is not a host"),
        ("redis://a,b", "several hosts are Sentinels or a cluster"),
        ("redis://h/x", "'x' is not a database's number"),
        ("redis://h/1/2", "only a database's number"),
        ("redis://h?db=1", "'h?db=1' is not a host"),
        ("redis+sentinel://a,b", "the master's name must follow"),
        ("redis+sentinel://a/m/x", "'x' is not a database's number"),
        ("redis+cluster://a/1", "a cluster has no databases"),
        ("unix:run/redis", "is not a socket's"),
        ("unix:///run/redis?db=x", "is not a socket's"),
    ],
)
def test_urls_that_are_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"url {url!r}")) as raised:
        parse(url)
    assert why in str(raised.value)


@pytest.mark.parametrize("url", ["redis://:sesame@h", "rediss://me:sesame@h", "unix://sesame@/run/redis"])
def test_a_password_in_the_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, {"store": {"url": url}, "identity": {"secret": "s"}})
    assert "store.password_file" in str(raised.value)
    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prefix": "a b"}, "prefix 'a b': use up to 64"),
        ({"prefix": "{x}"}, "prefix '{x}': use"),
        ({"password": "a", "password_file": "b"}, "leave one of them out"),
        ({"password_file": "/none/there"}, "password_file '/none/there': No such file"),
        ({"password": "***"}, "password is the mask"),
        ({"username": "me"}, "username 'me' is set without a password"),
        ({"sentinel_password": "x"}, "url names no Sentinels"),
        ({"ca_file": "/none"}, "ca_file is set, and url does not begin with rediss"),
        ({"verify": False}, "verify is set, and url does not begin with rediss"),
        ({"url": "rediss://h", "cert_file": "/none"}, "cert_file and key_file go together"),
        ({"url": "rediss://h", "ca_file": "/none"}, "ca_file '/none': No such file"),
        ({"url": "rediss://h", "ca_file": "/none", "verify": False}, "of no use with verify: false"),
        ({"wait_s": 1.5}, "wait_s"),
        ({"wait_s": -0.1}, "wait_s"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_what_else_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match="StoreSettings") as raised:
        StoreSettings.model_validate({"url": "redis://h", **given})
    assert why in str(raised.value)


def test_an_empty_password_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" \n")
    with pytest.raises(ValidationError, match="is empty: write the password into it"):
        StoreSettings(url="redis://h", password_file=str(file))


def test_a_store_wants_a_secret() -> None:
    with pytest.raises(ConfigError, match="give all routers the same secret"):
        load(None, {"store": {"url": "redis://h"}})
    load(None, {"store": {"url": "redis://h"}, "identity": {"secret": "s"}})


def test_passwords_are_not_shown() -> None:
    store = {"url": "redis+sentinel://h/m", "password": "sesame", "sentinel_password": "sesame"}
    settings = load(None, {"store": store, "identity": {"secret": "s"}})
    assert "sesame" not in str(masked(settings))
    assert "sesame" not in repr(settings)
    with pytest.raises(ConfigError) as raised:
        load(None, {"store": {"pasword": "sesame"}})
    assert "sesame" not in str(raised.value)


async def test_without_a_url_there_is_no_store() -> None:
    assert store_of(Settings()) is None
    store = store_of(load(None, {"store": {"url": "redis://h"}, "identity": {"secret": "s"}}))
    assert isinstance(store, RedisStore)
    await store.close()


def test_the_rights_are_documented() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    assert f"on >PASSWORD {ACL.replace('PREFIX', 'warmroute')}\n" in text
    assert f"`{ACL_CLUSTER}`" in text
