"""What can be configured, where it comes from, and how what is wrong is told."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from policies.registry import POLICIES, parameters
from router.configuration import ConfigError, load, masked
from router.settings import IdentitySettings, Settings

Write = Callable[[str], str]

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have settings of their own."""
    for name in list(os.environ):
        if name.upper().startswith("WARMROUTE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "warmroute.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(file: str | None = None, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        load(file, flags)
    return str(raised.value)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


# Where it comes from


def test_defaults_are_sane() -> None:
    settings = load()
    assert settings == Settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert (settings.admin.host, settings.admin.port) == ("127.0.0.1", 8081)
    assert settings.replicas == []
    assert settings.policy.name == "session_affinity"
    assert settings.pool.idle_s < 5, "SGLang's uvicorn closes idle connections after 5 s"
    assert settings.health.deep_timeout_s > 20, "SGLang answers a failed /health after 20 s"


def test_every_key_is_documented() -> None:
    """Keys stand in the operations page, alone or under their section."""
    text = OPERATIONS.read_text(encoding="utf-8")
    sections_as_whole = {"health", "reports"}
    for key in leaves(masked(Settings())):
        section, _, name = key.rpartition(".")
        if section in sections_as_whole:
            assert f"`{section}.*`" in text
        elif section in ("policy", "policy.parameters"):
            assert "{name, parameters}" in text
        else:
            assert f"`{key}`" in text or f"`.{name}`" in text or f"`{name}`" in text, f"{key} is not documented"


def test_precedence(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("port: 1\nhost: in-file\nadmin: {port: 2, host: in-file, open: true}\nlimits: {header_bytes: 10}")
    monkeypatch.setenv("WARMROUTE_PORT", "11")
    monkeypatch.setenv("WARMROUTE_ADMIN__PORT", "12")
    settings = load(file, {"port": 21})
    assert settings.port == 21
    assert settings.host == "in-file"
    assert (settings.admin.port, settings.admin.host) == (12, "in-file")
    assert settings.limits.header_bytes == 10
    assert settings.limits.connections == Settings().limits.connections


def test_a_policy_named_above_leaves_the_parameters_of_the_one_below(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("policy: {name: session_affinity, parameters: {beta: 2}}")
    assert load(file).policy.parameters == {"beta": 2}
    assert load(file, {"policy": "random"}).policy.parameters == {}
    monkeypatch.setenv("WARMROUTE_POLICY", "random")
    assert load(file).policy.parameters == {}
    monkeypatch.setenv("WARMROUTE_POLICY__PARAMETERS__SEED", "7")
    assert (load().policy.name, load().policy.parameters) == ("random", {"seed": 7})


def test_a_shadow_is_named_beside_the_policy(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("policy: {name: random, parameters: {seed: 3}, shadow: {name: sticky, parameters: {max_sessions: 5}}}")
    shadow = load(file).policy.shadow
    assert (shadow.name, shadow.parameters) == ("sticky", {"max_sessions": 5})
    replaced = load(file, {"policy": {"shadow": "rendezvous"}}).policy
    assert (replaced.name, replaced.parameters) == ("random", {"seed": 3}), "naming a shadow leaves the policy alone"
    assert (replaced.shadow.name, replaced.shadow.parameters) == ("rendezvous", {})
    assert load(file, {"policy": "round_robin"}).policy.shadow == shadow, "and the other way round"
    assert load(file, {"policy": {"shadow": None}}).policy.shadow.name == ""
    monkeypatch.setenv("WARMROUTE_POLICY", "session_affinity")
    monkeypatch.setenv("WARMROUTE_POLICY__SHADOW", "random")
    monkeypatch.setenv("WARMROUTE_POLICY__SHADOW__PARAMETERS__SEED", "7")
    policy = load(file).policy
    assert (policy.name, policy.parameters) == ("session_affinity", {})
    assert (policy.shadow.name, policy.shadow.parameters) == ("random", {"seed": 7})
    assert masked(load(file))["policy"]["shadow"] == {"name": "random", "parameters": {"seed": 7}}
    assert "shadow" not in masked(load(write("port: 1"), {"policy": {"shadow": ""}}))["policy"]


@pytest.mark.parametrize(
    ("shadow", "told"),
    [
        ("nosuch", "policy.shadow: unknown policy 'nosuch'"),
        ("{name: random, parameters: {sed: 1}}", "policy.shadow: policy random: unknown parameter 'sed'"),
        ("{parameters: {seed: 1}}", "policy.shadow: unknown policy ''"),
        ("{nmae: random}", "policy.shadow.nmae: unknown key, set to 'random': did you mean 'policy.shadow.name'?"),
        ("3", "policy.shadow: "),
    ],
)
def test_a_shadow_that_cannot_be_is_told(shadow: str, told: str, write: Write) -> None:
    assert told in refusal(write(f"policy: {{shadow: {shadow}}}"))


@pytest.mark.parametrize("value", ["http://a:1,http://b:2", "http://a:1, http://b:2/,", '["http://a:1", "http://b:2"]'])
def test_replicas_from_the_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_REPLICAS", value)
    assert [replica.url for replica in load().replicas] == ["http://a:1", "http://b:2"]


def test_lower_case_variables_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("warmroute_log__level", "DEBUG")
    assert load().log.level == "debug"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WARMROUTE_SERVICE_HOST", "10.0.0.1"),
        ("WARMROUTE_SERVICE_PORT", "80"),
        ("WARMROUTE_SERVICE_PORT_HTTP", "80"),
        ("WARMROUTE_PORT", "tcp://10.0.0.1:80"),
        ("WARMROUTE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("WARMROUTE_PORT_80_TCP_PROTO", "tcp"),
        ("WARMROUTE_ADMIN_PORT", "tcp://10.0.0.1:81"),
        ("WARMROUTE_ADMIN_SERVICE_HOST", "10.0.0.1"),
    ],
)
def test_what_kubernetes_sets_for_a_service_of_our_name_is_not_ours(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert load() == Settings()


def test_what_is_printed_can_be_read_again(write: Write) -> None:
    settings = load(write("replicas: [{url: 'http://a', weight: 2}]\npolicy: random\nadmin_paths: {allow: ['*']}"))
    printed = masked(settings)
    again = load(write(yaml.safe_dump(printed)))
    assert masked(again) == printed
    assert again.replicas == settings.replicas
    assert again.policy.parameters == {"seed": 0}, "printed with what was not given"


def test_the_parameters_in_force_are_shown_given_or_not(write: Write) -> None:
    for name in POLICIES:
        assert masked(load(flags={"policy": name}))["policy"] == {"name": name, "parameters": parameters(name)}
    given = load(write("policy: {name: random, parameters: {seed: 7}}"))
    assert masked(given)["policy"]["parameters"] == {"seed": 7}


def test_the_secret_is_hidden(write: Write) -> None:
    settings = load(write("identity: {secret: hush}"))
    assert settings.identity.secret.get_secret_value() == "hush"
    assert "hush" not in yaml.safe_dump(masked(settings)) + repr(settings)


# Replicas


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://a:30000", "http://a:30000"),
        ("HTTP://A:30000/", "http://a:30000"),
        (" http://a ", "http://a"),
        ("http://a:80/x/", "http://a/x"),
        ("https://a:443", "https://a"),
        ("https://a:80/Base/v2", "https://a:80/Base/v2"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_ids_are_normal_urls(url: str, normal: str, write: Write) -> None:
    (replica,) = load(flags={"replicas": [url]}).replicas
    assert (replica.url, replica.id, replica.weight) == (normal, normal, 1.0)


def test_a_replica_may_have_a_name_and_a_weight(write: Write) -> None:
    (replica,) = load(write("replicas: [{url: 'http://a:1/', id: gpu-7, weight: 0.5}]")).replicas
    assert (replica.url, replica.id, replica.weight) == ("http://a:1", "gpu-7", 0.5)


# What is wrong


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", r"prot: unknown key, set to 1: did you mean 'port'\?"),
        ("admin: {prot: 1}", r"admin\.prot: unknown key, set to 1: did you mean 'admin\.port'\?"),
        ("admin_port: 1", r"admin_port: unknown key, set to 1: did you mean 'admin\.port'"),
        ("deep_interval_s: 1", r"did you mean 'health\.deep_interval_s'\?"),
        ("zzz: 1", r"zzz: unknown key, set to 1: known keys are host, port, "),
        ("yes: 1", r"True: unknown key"),
        ("port: 70000", r"port: .*less than or equal to 65535, got 70000"),
        ("port: many", r"port: .*whole number, got 'many'"),
        ("port: yes", r"port: true is neither a number nor a text"),
        ("timeouts: {idle_s: 0}", r"timeouts\.idle_s: .*greater than 0, got 0"),
        ("timeouts: {idle_s: .inf}", r"timeouts\.idle_s: .*finite number, got inf"),
        ("drain: {delay_s: -1}", r"drain\.delay_s: .*greater than or equal to 0, got -1"),
        ("drain: {grace_s: .nan}", r"drain\.grace_s: .*finite number, got nan"),
        ("retries: {tries: 0}", r"retries\.tries: .*greater than or equal to 1, got 0"),
        ("retries: {budget_share: .nan}", r"retries\.budget_share: .*finite number, got nan"),
        ("health: {deep_timeout_s: 1}", r"health\.deep_timeout_s: .*greater than 1, got 1"),
        ("health: {interval_s: 0.000001}", r"health\.interval_s: .*greater than or equal to 0\.1, got 1e-06"),
        ("health: {deep_interval_s: 0.5}", r"health\.deep_interval_s: .*greater than or equal to 1, got 0\.5"),
        ("reports: {interval_s: 0.01}", r"reports\.interval_s: .*greater than or equal to 0\.1, got 0\.01"),
        ("health: {open_s: 400}", r"health: open_s 400 is more than open_max_s 300, up to which it grows: raise"),
        ("limits: {body_bytes: 2, body_memory_bytes: 1}", r"limits: body_bytes 2 is more than body_memory_bytes 1"),
        ("log: {format: xml}", r"log\.format: .*'auto', 'json' or 'text', got 'xml'"),
        ("host: ''", r"host: .*at least 1 character, got ''"),
        ("admin: {port: 8080}", r"admin\.port: 8080 is the data port as well: choose another"),
        ("policy: nosuch", r"policy: unknown policy 'nosuch'; known policies: session_affinity"),
        ("policy: {name: random, parameters: {sed: 1}}", r"policy random: unknown parameter 'sed'.*: seed"),
        ("policy: {name: random, parameters: {seed: x}}", r"policy random: parameter 'seed' must be int, got 'x'"),
        ("identity: {rules: [{header: x-request-id}]}", r"^identity\.rules\.0\.header: 'x-request-id' changes with"),
        ("limits: {body_bytes: 64MiB}", r"body_bytes: expected a whole number of bytes, .*'64MiB': write 67108864$"),
        ("limits: {body_bytes: 64 MB}", r"got '64 MB': write 64000000$"),
        ("limits: {body_bytes: 1.5}", r"limits\.body_bytes: expected a whole number of bytes, without unit, got 1\.5$"),
        (
            "timeouts: {idle_s: 5m}",
            r"timeouts\.idle_s: expected a number of seconds, without unit, got '5m': write 300$",
        ),
        ("timeouts: {idle_s: soon}", r"timeouts\.idle_s: expected a number of seconds, without unit, got 'soon'$"),
        ("admission: {kv_gate: maybe}", r"^admission\.kv_gate: expected true or false, got 'maybe'$"),
        ("port:", r"^port: expected a whole number, got nothing: write one, or leave the key out$"),
        ("discovery: {dns: [{name: a, port: x}]}", r"^discovery\.dns\.0\.port: expected a whole number, got 'x'$"),
        ("host: 5", r"^host: expected a text, got 5: write \"5\", in quotes$"),
        ("cors: {origins: x}", r"^cors\.origins: expected a list, as in \[a, b\], got 'x'$"),
        ("limits: 4", r"limits: expected a mapping of keys, got 4"),
        ("policy: {name: random, parameters: [1]}", r"policy\.parameters: expected a mapping of keys, got \[1\]"),
        (
            "admin_paths: {allow: [flush_cahce]}",
            r"admin_paths\.allow: 'flush_cahce' is not refused anyway: name a path",
        ),
        ("replicas: [{}]", r"replicas\.0\.url: is missing: set it"),
        ("replicas: [1]", r"replicas\.0: .*got 1"),
        ("replicas: ['ftp://a']", r"replicas\.0: 'ftp://a' is not a replica's URL: write it as in http://10"),
        ("replicas: ['a:1']", r"replicas\.0: 'a:1' is not a replica's URL"),
        ("replicas: ['http://a:0']", r"replicas\.0: 'http://a:0': the port must be a number from 1 to 65535"),
        ("replicas: ['http://a:x']", r"replicas\.0: 'http://a:x': the port must be"),
        ("replicas: ['http://[::1']", r"replicas\.0: 'http://\[::1': Invalid IPv6 URL"),
        ("replicas: ['http://ü']", r"replicas\.0: 'http://ü': only ASCII"),
        ("replicas: ['http://a b']", r"replicas\.0: 'http://a b': only ASCII without spaces"),
        ("replicas: ['http://u:p@a']", r"leave out user, query and fragment"),
        ("replicas: ['http://a', 'HTTP://A:80/']", r"replicas: http://a is given twice: remove one"),
        ("replicas: [{url: 'http://a', id: x}, {url: 'http://b', id: x}]", r"replicas: the id 'x' is given twice"),
        ("replicas: [{url: 'http://a', id: \"x\\r\\ny\"}]", r"replicas\.0\.id: .*without spaces"),
        ("replicas: [{url: 'http://a', wieght: 1}]", r"replicas\.0\.wieght: unknown key, set to 1: did you mean"),
        ("replicas: [{url: 'http://a', weight: -1}]", r"replicas\.0\.weight: .*got -1"),
        ("[1, 2]", r"--config .*: expected a mapping of keys such as `replicas:`, got list"),
        ("a: [", r"--config .*: not good YAML: "),
        ("port: 1\nport: 2", r"--config .*: not good YAML: the key 'port' is given twice: remove one .*line 2"),
        ("policy: &a {name: *a}", r"nested too deeply, or an alias that contains itself"),
    ],
)
def test_a_fault_in_the_file(text: str, told: str, write: Write) -> None:
    message = refusal(write(text))
    assert re.search(told, message), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "replicas: ['http://user:hush@a:1']",
        "replicas: ['user:hush@a:1']",
        "replicas: ['http://user:hu sh@a:1']",
        "replicas: ['http://user:hush@a:x']",
        "replicas: ['http://user:p@hush/@a:1']",
        "replicas: {url: 'http://user:hush@a:1'}",
        "replicas: [{url: 'http://user:hush@a:1', wieght: 2}]",
        "discovery: {file: [http://user:hush@a:1]}",
    ],
)
def test_a_password_in_a_url_is_not_repeated(text: str, write: Write) -> None:
    message = refusal(write(text))
    assert "***@a" in message
    assert "hush" not in message
    assert "sh@" not in message


def test_all_faulty_rules_are_told_by_plain_keys(write: Write) -> None:
    lines = refusal(write("identity: {rules: [{header: a b}, {body: messages}]}")).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["identity.rules.0.header", "identity.rules.1.body"]


def test_all_faults_are_told_at_once(write: Write) -> None:
    lines = refusal(write("port: x\ntimeouts: {body_s: 0}\nnosuch: 1")).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["nosuch", "port", "timeouts.body_s"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "nosuch.yaml")
    assert refusal(missing) == f"--config {missing}: No such file or directory: give the path of a readable YAML file"


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "bytes.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not good YAML" in refusal(str(file))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("WARMROUTE_PROT", "1", r"WARMROUTE_PROT='1': unknown key 'prot': did you mean 'port'\?"),
        ("WARMROUTE_ADMIN_PORT", "1", r"did you mean 'admin\.port' \(in the environment WARMROUTE_ADMIN__PORT\)\?"),
        ("WARMROUTE_ADMIN__PROT", "1", r"unknown key 'admin\.prot': did you mean 'admin\.port'\?"),
        ("WARMROUTE_LOG__LEVEL__X", "1", r"'level' has no keys below it"),
        ("WARMROUTE_PORT", "x", r"port: .*whole number, got 'x'"),
        ("WARMROUTE_ADMIN", "1", r"admin: .*got 1"),
        ("WARMROUTE_LIMITS", "{", r"WARMROUTE_LIMITS='\{': a list or a mapping is written as JSON"),
        ("WARMROUTE_ADMIN_PATHS__ALLOW", "*", r"WARMROUTE_ADMIN_PATHS__ALLOW='\*': a list or a mapping is written as"),
        ("WARMROUTE_REPLICAS", '["http://a"', r"replicas: .*is not JSON"),
        ("WARMROUTE_POLICY", '{"name":', r"policy: .*is not JSON"),
        ("WARMROUTE_POLICY__PARAMETERS__BETA", "x", r"parameter 'beta' must be float, got 'x'"),
    ],
)
def test_a_fault_in_the_environment(name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    message = refusal()
    assert re.search(told, message), message


def test_all_faults_are_told_at_once_wherever_they_are(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROT": "1",
        "ADMIN__PROT": "2",
        "LIMITS": "{",
        "ADMIN_PATHS__ALLOW": "*",
        "IDENTITY__SECERT": "hush",
        "ADMIN__PORT": "x",
        "RETRIES__TRIES": "0",
    }.items():
        monkeypatch.setenv(f"WARMROUTE_{name}", value)
    file = write("pool: {idle_s: never}\nretries: {tries: -1, budget_share: much}")
    lines = refusal(file, {"port": "y", "replicas": ["a:1"]}).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == [
        "admin.port",
        "environment variable WARMROUTE_ADMIN_PATHS__ALLOW='*'",
        "environment variable WARMROUTE_ADMIN__PROT='2'",
        "environment variable WARMROUTE_IDENTITY__SECERT=***",
        "environment variable WARMROUTE_LIMITS='{'",
        "environment variable WARMROUTE_PROT='1'",
        "pool.idle_s",
        "port",
        "replicas.0",
        "retries.budget_share",
        "retries.tries",
    ]
    assert "retries.tries: must be greater than or equal to 1, got '0'" in lines, "the file's is overruled"
    # So they are beside a file that cannot be read.
    lines = refusal("/nosuch/file", {"port": "y"}).splitlines()
    assert lines[0].startswith("--config /nosuch/file: No such file")
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("name", "file", "lines"),
    [
        ("TLS__KYE_FILE", "tls: {cert_file: /c}", 1),
        ("KYE_FILE", "tls: {cert_file: /c}", 1),
        ("TLS", "tls: {cert_file: /c}", 1),
        ("TLS__REPLICAS__KYE_FILE", "tls: {cert_file: /c}", 1),
        ("LIMITS", "tls: {cert_file: /c}", 2),
        ("TLS__KEY_FILE", "tls: {cert_file: 1}", 1),
        ("TLS__KYE_FILE", "tls: {cert_file: 1}", 2),
    ],
)
def test_what_may_be_no_fault_but_for_another_is_not_told(
    name: str, file: str, lines: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate without a key is none when the key's own name was misspelt."""
    monkeypatch.setenv(f"WARMROUTE_{name}", "{")
    told = refusal(write(file))
    assert told.count("\n") + 1 == lines, told
    assert ("go together" in told) == (name == "LIMITS"), told


def test_a_misspelt_secret_is_not_shown(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hush" not in refusal(write("identity: {secert: hush}"))
    assert "hush" not in refusal(write("identity: {secret: [hush]}"))
    monkeypatch.setenv("WARMROUTE_IDENTITY__SECERT", "hush")
    assert "hush" not in refusal()


_names = st.sampled_from([*Settings.model_fields, "url", "id", "weight", "name", "parameters", "rules", "allow", "x"])
_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names | st.integers() | st.booleans(), inner),
    max_leaves=8,
)


@given(st.dictionaries(_names, _trees, max_size=4))
def test_no_tree_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    try:
        settings = load(str(file))
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - either of the two outcomes is right
    else:
        assert isinstance(settings, Settings)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        Settings().limits.body_bytes = 1  # type: ignore[misc]


def test_the_mask_of_a_secret_is_not_taken_for_one() -> None:
    with pytest.raises(ValueError, match="mask"):
        IdentitySettings(secret=SecretStr("**********"))
