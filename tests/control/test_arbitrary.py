"""Whatever is given to the control plane from outside, as text or as bytes, makes a value or the one error it may make.

More of it, by structure rather than by bytes, in tests/router/test_settings.py and test_loads.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router import loads
from router.configuration import ConfigError, load, masked
from router.settings import Settings, normal_url
from tests.emulator import recorded

NOW = 1000.0

# Settings

_WORDS = """
    port admin host replicas policy name parameters identity rules secret limits log level : - [ ] { } & * &a *a << ? |
    > # % @ ` ' " ! --- ... ~ null yes 1 -1 .inf .nan 1e400 0x1f 2026-11-29 2026-13-45 http://a \\ , =
"""
_yaml = st.lists(st.sampled_from([*_WORDS.split(), " ", "\n", "\n  ", "\t", ": "]), max_size=14).map("".join)


def outcome(path: str) -> Settings | str:
    """The settings, or the message of the one error that may come. Any other is the test's failure."""
    try:
        settings = load(path)
    except ConfigError as error:
        message = str(error)
        assert message.strip()
        assert all(line.strip() for line in message.split("\n")), "a line for each fault, none empty"
        return message
    masked(settings)
    return settings


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Exactly these of our variables."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if name.upper().startswith("WARMROUTE_")}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(saved)


@settings(max_examples=300)
@given(text=st.text(max_size=60) | _yaml)
@example(text="port: &p 1\nadmin: {port: *p}")
@example(text="&a [*a]")
@example(text="[" * 1500)
@example(text="port: 1" + "0" * 5000)
@example(text="!!python/object/apply:os.system [ls]")
def test_any_text_as_a_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "any-text.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with environment():
        outcome(str(file))


@pytest.mark.parametrize("text", ["port: !!int ''", "port: !!float ''", "port: !!bool maybe", "a: !!timestamp never"])
def test_a_value_that_its_tag_forbids(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "tagged.yaml"
    file.write_text(text)
    with environment():
        assert "not good YAML" in str(outcome(str(file)))


_NAMES = """
    PORT HOST REPLICAS POLICY POLICY__PARAMETERS__TIE_S POLICY__NAME ADMIN ADMIN__PORT IDENTITY__RULES IDENTITY__SECRET
    LIMITS LOG__LEVEL ADMIN_PATHS__ALLOW RESPONSE_HEADERS _
"""
_names = st.sampled_from([*_NAMES.split(), ""])
_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
_VALUES = '[ { [] {} null true 1 -1 NaN "x" {"name":1} ,'
_values = _text | st.sampled_from([*_VALUES.split(), " , ", "[" * 2000, "1" + "0" * 5000])


@settings(max_examples=300)
@given(values=st.dictionaries(_names, _values, max_size=3))
def test_any_text_in_the_environment(values: dict[str, str]) -> None:
    with environment(**{f"WARMROUTE_{name}": value for name, value in values.items()}), suppress(ConfigError):
        assert isinstance(load(), Settings)


@pytest.mark.parametrize("value", ['{"secret": "hush"', "hush", '["hush"]', '{"secret": ["hush"]}'])
def test_a_secret_in_a_faulty_variable_is_not_told(value: str) -> None:
    with environment(WARMROUTE_IDENTITY=value), pytest.raises(ConfigError) as raised:
        load()
    assert "hush" not in str(raised.value)


@settings(max_examples=300)
@given(st.text(max_size=30) | st.text(alphabet="ahtp:/[]@?#%.-_0123456789,;|\\ ", max_size=30).map("http://".__add__))
def test_a_url_is_normal_or_refused(url: str) -> None:
    try:
        normal = normal_url(url)
    except ValueError as error:
        host = url.strip().rpartition("@")[2][:20]
        assert repr(host)[1:-1] in str(error), "it names the value"  # noqa: PT017 - either outcome is right
        return
    assert normal_url(normal) == normal, "normal forms are normal"
    assert normal.startswith(("http://", "https://"))


NO_HOSTS = (
    r"http://[::1]x:1 http://a,http://b http://a,b http://a;b http://a|b http://* http://a\b http://a%20b http://[a]"
)


@pytest.mark.parametrize("url", NO_HOSTS.split())
def test_what_is_no_host_is_refused_and_not_mended(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not a host with or without a port|IP"):
        normal_url(url)


@pytest.mark.parametrize(
    "url", ["http://[fe80::1%25eth0]:1", "http://[2001:db8::1]", "http://10.0.0.1", "http://a_b-c.d:9/x"]
)
def test_names_and_addresses_of_all_kinds_are_hosts(url: str) -> None:
    assert normal_url(url) == url


# Load reports

LIMIT = loads.MAX_COUNT * 100
"""A sum over a hundred ranks: larger would not be believed of one."""


def check(raw: bytes) -> None:
    for parse in (loads.from_loads, loads.from_get_load, loads.from_metrics):
        try:
            report = parse(raw, NOW)
        except ValueError as error:
            assert type(error) is ValueError, f"{parse.__name__}: not one of its own: {error!r}"  # noqa: PT017
            continue
        told = asdict(report.load)
        assert math.isfinite(at := told.pop("at"))
        assert at <= NOW
        counts = [*told.values(), report.prefilled_tokens, report.prefill_busy_us]
        assert all(count is None or (isinstance(count, int) and 0 <= count <= LIMIT) for count in counts), counts
    with suppress(ValueError):
        loads.from_server_info(raw)


@settings(max_examples=300)
@given(st.binary(max_size=200))
@example(b'{"loads": [{"num_running_reqs": 1' + b"0" * 5000 + b"}]}")
@example(b'{"timestamp": "0001-01-01T00:00:00+23:59", "loads": [{"timestamp": 1, "num_running_reqs": 1}]}')
@example(b'{"timestamp": "9999-12-31T23:59:59-23:59", "loads": [{"timestamp": 1, "num_running_reqs": 1}]}')
@example(b'{"startup_time": ' + b"[" * 900 + b"]" * 900 + b"}")
@example(b'{"startup_time": "\\ud800"}')
@example(b"sglang:num_running_reqs 1e300\n")
@example(b'sglang:num_running_reqs{a="b",a="b"} 1\n')
def test_any_bytes_as_a_report(raw: bytes) -> None:
    check(raw)


_REPORTS = ["v1_loads_under_load.json.txt", "v1_loads_prometheus_idle.txt", "server_info.txt"]
_RECORDED = {name: recorded.load(name).answer.body for name in _REPORTS}
_ALPHABET = b'0123456789eE+-.{}[]",:\\\x00\xff \n'


@settings(max_examples=300)
@given(name=st.sampled_from(_REPORTS), data=st.data())
def test_a_recorded_report_with_some_bytes_wrong(name: str, data: st.DataObject) -> None:
    raw = bytearray(_RECORDED[name][:3000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = bytes([data.draw(st.sampled_from(_ALPHABET))])
    check(bytes(raw))
