"""The only schema of configuration: every key, its type, its bounds and its default."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from policies import registry
from policies.admission import AdmissionConfig
from policies.admission.config import LEAST_HOLD_S, MOST_WAIT_S
from router import keys, token
from router.cutting import cut
from router.files import text_of
from router.hosts import in_url, without_credentials
from router.identity import CREDENTIALS, parse_rules
from router.proxy import guard
from router.proxy.headers import KEPT
from router.ranks import MAX_RANKS, ids
from router.store import address
from router.tls import replica_context, server_context

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=0.1, le=86_400, allow_inf_nan=False)]
"""Between two questions to one replica: more often the answers cost it and the router more than they tell."""
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A share of new sessions, beside those of other replicas: 0 gets none, and keeps those that are there."""
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
"""An engine's data-parallel size, SGLang's `--dp-size`: above 1 each rank is a replica of its own."""
_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A pool's name. It goes into headers, metric labels and log lines."""

InPool = Annotated[str, Field(json_schema_extra={"pattern": f"^({_POOL.pattern})?$"})]
"""Of `pools` the one whose replicas these are; the first without one."""
Sampled = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_ADMISSION = AdmissionConfig()

_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\])(:\d*)?")
"""A name or an address, IPv6 in brackets, and a port. Python's parser takes nearly anything for a host."""

_URL = re.compile(rf"\s*[Hh][Tt][Tt][Pp][Ss]?://{_AUTHORITY.pattern}(/[!\"$->@-~]*)?\??#?\s*")
"""What `normal_url` takes, and a little more."""

_HTTP = re.compile(r"https?://[!-~]+")

MAX_URL_CHARS = 2_000
"""Of a replica. It goes into headers, metric labels and log lines."""

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110, section 5.6.2."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
"""As browsers write it: in lower case, without a path."""

_ID = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces: an id goes into headers, metric labels and log lines."""


def _schema(**said: Any) -> Any:
    """For the JSON schema alone, by which the Helm chart refuses early what a validator refuses here.

    It may take what is refused here; it never refuses what is taken. What may hold a secret has no pattern: Helm shows
    what does not match.
    """
    return Field(json_schema_extra=said)


def _as(pattern: re.Pattern[str], *, empty: bool = False) -> Any:
    """That a text is as a pattern has it, or empty."""
    return _schema(pattern=f"^({pattern.pattern}){'?' * empty}$")


def _no_bool(value: Any, annotation: object) -> Any:
    # `port: yes` would be port 1.
    if isinstance(value, bool) and annotation is not bool:
        raise ValueError(f"{str(value).lower()} is neither a number nor a text: write a value, in quotes if need be")
    return value


def is_loopback(host: str) -> bool:
    """Whether a listener on this host can be reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _not_bool(cls, value: Any, info: ValidationInfo) -> Any:
        return _no_bool(value, cls.model_fields[str(info.field_name)].annotation)


class ServerTlsSettings(_Part):
    """How a port speaks TLS; without a certificate it does not."""

    cert_file: str = ""
    """The certificate and those between it and the authority, as PEM."""
    key_file: str = ""
    client_ca_file: str = ""
    """Authorities whose certificate a client must show."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together: give both, or neither for plain HTTP")
        if self.client_ca_file and not self.cert_file:
            raise ValueError("client_ca_file needs cert_file and key_file: without TLS no client shows a certificate")
        if self.cert_file:
            server_context(self.cert_file, self.key_file, self.client_ca_file)
        return self


class ReplicaTlsSettings(_Part):
    """How replicas with an https URL are spoken to."""

    ca_file: str = ""
    """Authorities to trust instead of the system's."""
    cert_file: str = ""
    """Shown to replicas that ask for one, with `key_file`."""
    key_file: str = ""
    verify: bool = True

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together: give both, or neither")
        if self.ca_file and not self.verify:
            raise ValueError("ca_file is of no use with verify: false: leave one of them out")
        if self.ca_file or self.cert_file:
            replica_context(self.ca_file, self.cert_file, self.key_file, verify=self.verify)
        return self


class TlsSettings(ServerTlsSettings):
    """The data port's, and the replicas'."""

    replicas: ReplicaTlsSettings = ReplicaTlsSettings()


class AdminSettings(_Part):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8081
    token: SecretStr = SecretStr("")
    token_file: str = ""
    open: bool = False
    """Serve without a token although others than this machine can reach the port."""
    open_metrics: bool = False
    """Serve `/metrics` without the token."""
    tls: ServerTlsSettings = ServerTlsSettings()

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        secret = self.token.get_secret_value()
        if secret and self.token_file:
            raise ValueError("token and token_file are both set: leave one of them out")
        if secret:
            try:
                token.checked(secret)
            except ValueError as error:
                raise ValueError(f"token (not shown here) {error}") from None
        if self.token_file:
            try:
                token.read(self.token_file)
            except ValueError as error:
                raise ValueError(f"token_file {error}") from None
        if self.guarded and self.open:
            raise ValueError("open is true, and a token or client_ca_file is set: leave one of them out")
        self.check_guarded()
        return self

    def check_guarded(self) -> None:
        """Raises ValueError when anyone who can reach the port could change everything, and nothing says so."""
        if not self.guarded and not self.open and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached by others, who could change everything: set admin.token_file or "
                "admin.token, ask for certificates with admin.tls.client_ca_file, or set admin.open: true where all "
                "who can reach it may"
            )

    @property
    def guarded(self) -> bool:
        """Whether who asks must prove something."""
        return bool(self.token.get_secret_value() or self.token_file or self.tls.client_ca_file)


class ReplicaSettings(_Part):
    """A replica: its URL, a stable name (the URL unless given), and its share of traffic for policies that heed it."""

    url: Annotated[str, _as(_URL)]
    id: Annotated[str, _as(_ID, empty=True)] = ""
    weight: Weight = 1.0
    """Of each rank, where there are several."""
    ranks: Ranks = 1
    pool: InPool = ""

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"url": value}
        if isinstance(value, Mapping) and isinstance(url := value.get("url"), str):
            url = normal_url(url)
            value = {**value, "url": url, "id": value.get("id") or url}
        return value

    @field_validator("id")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not _ID.fullmatch(value):
            raise ValueError(f"{cut(repr(value))}: use up to 256 letters, digits and signs of ASCII, without spaces")
        return value

    @property
    def ids(self) -> list[str]:
        """Of the replicas that it is: its own, or one for each rank."""
        return ids(self.id, self.ranks)


MAX_POOLS = 100

_PATTERN = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")
"""Of models' names: as clients write them, with `*` for anything."""


class ModelsSettings(_Part):
    """A pool: replicas that only some requests go to, by name and by the models that they serve."""

    name: Annotated[str, _as(_POOL)]
    models: list[Annotated[str, _as(_PATTERN)]] = []
    """Patterns of names, `*` standing for anything, in small letters or large ones."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not _POOL.fullmatch(self.name):
            raise ValueError(
                f"name {cut(repr(self.name))} is none for a pool: use up to 63 letters, digits and signs of . _ -, as "
                "in large"
            )
        for pattern in self.models:
            if not _PATTERN.fullmatch(pattern):
                raise ValueError(
                    f"models: {cut(repr(pattern))} is no pattern: write a model's name, or a part of it and *, as in "
                    "*haiku*"
                )
        return self


class _NamedPolicy(_Part):
    """A policy by name, or by name and parameters."""

    name: str
    parameters: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _decoded(value) if value.lstrip().startswith("{") else {"name": value}
        return value

    @model_validator(mode="after")
    def _exists(self) -> Self:
        registry.make(self.name, self.parameters)
        return self


class ShadowSettings(_NamedPolicy):
    """A policy asked beside the one in charge and never obeyed; without a name there is none."""

    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_nothing(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.name or self.parameters:
            registry.make(self.name, self.parameters)
        return self


class PolicySettings(_NamedPolicy):
    name: str = "session_affinity"
    shadow: Annotated[ShadowSettings, NoDecode] = ShadowSettings()


class DirectorySettings(_Part):
    max_sessions: Annotated[int, Field(ge=1)] = 200_000
    idle_s: Seconds = 3600.0


def _no_mask(name: str, secret: SecretStr, what: str) -> None:
    """Raises ValueError for what `check-config` prints instead of a secret."""
    if set(secret.get_secret_value()) == {"*"}:
        raise ValueError(f"{name} is the mask that check-config prints: put the {what} itself in its place")


class IdentitySettings(_Part):
    rules: list[dict[str, Any]] | None = None
    secret: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _parse(self) -> IdentitySettings:
        parse_rules(self.rules or [])
        _no_mask("secret", self.secret, "secret")
        return self


class LimitSettings(_Part):
    header_bytes: Bytes = 65_536
    body_bytes: Bytes = 67_108_864
    body_memory_bytes: Bytes = 1_073_741_824
    connections: Annotated[int, Field(ge=1)] = 16_384

    @model_validator(mode="after")
    def _fits(self) -> LimitSettings:
        if self.body_bytes > self.body_memory_bytes:
            raise ValueError(
                f"body_bytes {self.body_bytes} is more than body_memory_bytes {self.body_memory_bytes}, "
                "which holds all bodies at once: raise that or lower it"
            )
        return self


_Count = Annotated[int, _schema(minimum=0)]


class AdmissionSettings(_Part):
    """As policies.admission.AdmissionConfig, which has the bounds and the defaults."""

    max_running: _Count = _ADMISSION.max_running
    max_running_per_replica: _Count = _ADMISSION.max_running_per_replica
    max_tokens: _Count = _ADMISSION.max_tokens
    max_tokens_per_replica: _Count = _ADMISSION.max_tokens_per_replica
    max_waiting: _Count = _ADMISSION.max_waiting
    max_wait_s: Annotated[float, _schema(minimum=0.1, maximum=MOST_WAIT_S)] = _ADMISSION.max_wait_s
    kv_gate: bool = _ADMISSION.kv_gate
    max_hold_s: Annotated[float, _schema(minimum=LEAST_HOLD_S, maximum=86_400)] = _ADMISSION.max_hold_s
    priority_header: Annotated[str, _as(_HEADER, empty=True)] = ""
    """Its value is `high`, `normal` or `low`; without a name nobody looks for it."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.priority_header and not _HEADER.fullmatch(self.priority_header):
            raise ValueError(f"priority_header {self.priority_header!r} is no name of a header: as in x-priority")
        self.config()
        return self

    @property
    def priority(self) -> bytes:
        """The header's name as the data path compares it; empty when there is none."""
        return self.priority_header.lower().encode()

    def config(self) -> AdmissionConfig:
        """For the core. Raises ValueError when it cannot be."""
        return AdmissionConfig(**self.model_dump(exclude={"priority_header"}))


class TimeoutSettings(_Part):
    header_s: Seconds = 30.0
    body_s: Seconds = 120.0
    keep_alive_s: Seconds = 75.0
    connect_s: Seconds = 3.0
    first_byte_s: Seconds = 900.0
    idle_s: Seconds = 300.0
    stalled_client_s: Seconds = 300.0


class RetrySettings(_Part):
    tries: Annotated[int, Field(ge=1, le=100)] = 3
    budget_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.2
    budget_burst: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0


class PoolSettings(_Part):
    idle_s: Seconds = 3.0


class HealthSettings(_Part):
    interval_s: Interval = 1.0
    timeout_s: Seconds = 2.0
    deep_interval_s: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = 15.0
    """1 or more: each makes the engine generate a token."""
    deep_timeout_s: Annotated[float, Field(gt=1, le=86_400, allow_inf_nan=False)] = 25.0
    """More than 1: SGLang looks only once a second whether `/health` has been answered."""
    fail_after: Annotated[int, Field(ge=1)] = 3
    pass_after: Annotated[int, Field(ge=1)] = 2
    passive_fail_after: Annotated[int, Field(ge=1)] = 3
    error_fail_after: Annotated[int, Field(ge=1)] = 5
    """Envoy's consecutive_5xx. More than of other failures: some requests fail wherever they go."""
    failure_share: Share = 0.5
    failure_window: Annotated[int, Field(ge=1, le=1000)] = 20
    open_s: Seconds = 5.0
    open_max_s: Seconds = 300.0
    """Envoy's max_ejection_time."""
    panic_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Envoy's healthy_panic_threshold; 0: never."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.open_s > self.open_max_s:
            raise ValueError(
                f"open_s {self.open_s:g} is more than open_max_s {self.open_max_s:g}, up to which it grows: "
                "raise that or lower it"
            )
        return self


class ReportSettings(_Part):
    interval_s: Interval = 1.0
    timeout_s: Seconds = 2.0


class DrainSettings(_Part):
    delay_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0.0
    grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 600.0
    session_idle_s: Seconds = 600.0
    """Idle for so long, a session that a replica finishes is taken to have ended."""


class ReloadSettings(_Part):
    watch: bool = True
    """Reload when the content of the configuration file has changed."""
    interval_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] = 2.0
    """Between two looks at it."""


class AdminPathSettings(_Part):
    allow: list[str] = []

    @field_validator("allow")
    @classmethod
    def _refused_otherwise(cls, value: list[str]) -> list[str]:
        for path in value:
            if path != "*" and not guard.route(f"/{path.strip('/')}".encode()).admin:
                raise ValueError(
                    f"{path!r} is not refused anyway: name a path of engine administration, as flush_cache"
                )
        return value

    @property
    def paths(self) -> frozenset[str]:
        """In normal form."""
        return frozenset(path.strip("/") for path in self.allow)


class KeySettings(_Part):
    """One holder's keys: their hashes, several while an old one is being replaced."""

    hash: list[str]
    max_in_flight: Annotated[int, Field(ge=0)] | None = None
    """Instead of the section's."""

    @model_validator(mode="before")
    @classmethod
    def _from_hash(cls, value: Any) -> Any:
        value = {"hash": value} if isinstance(value, str) else value
        if isinstance(value, Mapping) and isinstance(value.get("hash"), str):
            value = {**value, "hash": [value["hash"]]}
        return value

    @field_validator("hash")
    @classmethod
    def _hashes(cls, value: list[str]) -> list[str]:
        return [keys.checked_hash(each) for each in value]


class KeysSettings(_Part):
    """Who may use the data port; without `accept` and `file` everyone may."""

    accept: dict[Annotated[str, _as(keys.NAME)], KeySettings] = {}
    file: str = ""
    """Further ones, a line `NAME:sha256:...` each."""
    max_in_flight: Annotated[int, Field(ge=0)] = 0
    """Requests of one holder at once; 0 is without limit."""
    credential: Literal["pass", "strip", "replace"] = "pass"
    """What becomes of a client's credential on its way to a replica."""
    replica_key: SecretStr = SecretStr("")
    """What replicas are shown: instead of clients' credentials, and by probes."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        for name in self.accept:
            keys.checked_name(name)
        if self.on:
            keys.made(self)
        key = self.replica_key.get_secret_value()
        if set(key) == {"*"} or not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError("replica_key (not shown here) is no key: write it as it was given to the engine")
        if (self.credential == "replace") != bool(key):
            raise ValueError("credential: replace and replica_key go together: set both, or neither")
        return self

    @property
    def on(self) -> bool:
        """Whether keys are asked for."""
        return bool(self.accept or self.file)


class HeaderListSettings(_Part):
    """Names of headers that do not go on (`deny`), or the only ones that do (`allow`)."""

    deny: list[Annotated[str, _as(_HEADER)]] = []
    allow: list[Annotated[str, _as(_HEADER)]] = []

    @model_validator(mode="after")
    def _names(self) -> Self:
        if self.deny and self.allow:
            raise ValueError("deny and allow are both set: leave one of them out")
        for name in (*self.deny, *self.allow):
            if not _HEADER.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a header: write it as in x-internal-id")
            if name.lower().encode() in CREDENTIALS:
                raise ValueError(f"{name!r} is a credential: keys.credential tells what becomes of it, leave it out")
        for name in self.deny:
            if name.lower().encode() in KEPT:
                raise ValueError(f"{name!r} cannot be dropped: the message would mean something else without it")
        return self


class HeadersSettings(_Part):
    request: HeaderListSettings = HeaderListSettings()
    response: HeaderListSettings = HeaderListSettings()


class CorsSettings(_Part):
    """Which web pages may use the data port from a browser."""

    origins: list[Annotated[str, _as(_ORIGIN)]] = []

    @field_validator("origins")
    @classmethod
    def _closed(cls, value: list[str]) -> list[str]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: write each as in https://chat.example.com, without path"
                )
        return value


class LogSettings(_Part):
    format: Literal["auto", "json", "text"] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lambda v: str(v).lower())] = "info"
    sample: Sampled = 1.0
    """Of the requests that went well; all others are logged whatever it is."""


class TracingSettings(_Part):
    endpoint: Annotated[str, _as(_HTTP, empty=True)] = ""
    """Of a collector, as in http://collector:4318/v1/traces. Nothing is traced without one."""
    sample: Sampled = 1.0
    """Of the requests that come without a trace's context; a client's context decides for its own."""
    service: Annotated[str, Field(min_length=1)] = "warmroute"

    @model_validator(mode="after")
    def _can(self) -> Self:
        if self.endpoint and not _HTTP.fullmatch(self.endpoint):
            raise ValueError(f"endpoint {self.endpoint!r} is not a URL: write it as in http://collector:4318/v1/traces")
        if self.endpoint and find_spec("opentelemetry") is None:
            raise ValueError("endpoint is set, but OpenTelemetry is not installed: pip install 'warmroute[otel]'")
        return self


class JournalSettings(_Part):
    path: str = ""
    """None is kept without one."""
    max_bytes: Annotated[int, Field(ge=65_536)] = 268_435_456
    files: Annotated[int, Field(ge=1, le=1000)] = 4


_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class StoreSettings(_Part):
    """What is shared with other routers through Redis or Valkey; nothing without a URL."""

    url: Annotated[str, _as(address.LIKE, empty=True)] = ""
    username: str = ""
    password: SecretStr = SecretStr("")
    password_file: str = ""
    """Read at every new connection."""
    sentinel_password: SecretStr = SecretStr("")
    ca_file: str = ""
    """Authorities to trust besides the system's."""
    cert_file: str = ""
    """Shown to a server that asks for one, with `key_file`."""
    key_file: str = ""
    verify: bool = True
    prefix: Annotated[str, _as(_PREFIX)] = "warmroute"
    """Begins the names of all keys."""
    wait_s: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.02
    """How long a request waits for it at most."""
    timeout_s: Annotated[float, Field(ge=0.05, le=60, allow_inf_nan=False)] = 1.0
    """How long all else does."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        place = address.parse(self.url) if self.url else None
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix {self.prefix!r}: use up to 64 letters, digits and signs of . _ : -")
        _no_mask("password", self.password, "password")
        _no_mask("sentinel_password", self.sentinel_password, "password")
        if self.password.get_secret_value() and self.password_file:
            raise ValueError("password and password_file are both set: leave one of them out")
        if self.password_file:
            self._password_of_file()
        if self.username and not (self.password.get_secret_value() or self.password_file):
            raise ValueError(f"username {self.username!r} is set without a password: set password_file or password")
        if self.sentinel_password.get_secret_value() and (place is None or place.kind != "sentinel"):
            raise ValueError("sentinel_password is set, and url names no Sentinels: leave it out")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together: give both, or neither")
        files = [name for name in ("ca_file", "cert_file") if getattr(self, name)]
        if (files or not self.verify) and (place is None or not place.tls):
            name = files[0] if files else "verify"
            raise ValueError(f"{name} is set, and url does not begin with rediss: leave it out, or write rediss")
        if self.ca_file and not self.verify:
            raise ValueError("ca_file is of no use with verify: false: leave one of them out")
        if files:
            replica_context(self.ca_file, self.cert_file, self.key_file, verify=self.verify)
        return self

    def credentials(self) -> tuple[str, str] | None:
        """User and password, as they are now; None when there are none. Raises ValueError naming file and remedy."""
        password = self._password_of_file() if self.password_file else self.password.get_secret_value()
        return (self.username, password) if password else None

    def _password_of_file(self) -> str:
        try:
            password = text_of(self.password_file).strip()
        except ValueError as error:
            raise ValueError(f"password_file {error}") from None
        if not password:
            raise ValueError(f"password_file {self.password_file!r} is empty: write the password into it")
        return password


_LABEL = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_REQUIREMENT = re.compile(
    rf"!?{_LABEL}|{_LABEL}\s*(=|==|!=)\s*{_VALUE}|{_LABEL}\s+(in|notin)\s+\(\s*{_VALUE}(\s*,\s*{_VALUE})*\s*\)"
)
"""One of a label selector, as https://kubernetes.io/docs/concepts/overview/working-with-objects/labels has them."""


_SELECTOR = re.compile(rf"\s*({_REQUIREMENT.pattern})(\s*,\s*({_REQUIREMENT.pattern}))*\s*")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Of a namespace, a service or a port in Kubernetes: a label of RFC 1123."""


class KubernetesSettings(_Part):
    """Pods of one service, or of the EndpointSlices that a selector finds."""

    namespace: Annotated[str, _as(_NAME, empty=True)] = ""
    """The router's own without one."""
    service: Annotated[str, _as(_NAME, empty=True)] = ""
    selector: Annotated[str, _as(_SELECTOR, empty=True)] = ""
    """Of labels of the EndpointSlices; they bear those of their service."""
    port: Annotated[int, _schema(minimum=1, maximum=65_535)] | Annotated[str, _as(_NAME, empty=True)] = ""
    """The pods', by number or name; it need not be given where they have only one."""
    scheme: Literal["http", "https"] = "http"
    weight: Weight = 1.0
    """Of each pod, or of each rank of it."""
    ranks: Ranks = 1
    """Of each pod's engine."""
    pool: InPool = ""
    url: Annotated[str, _as(_HTTP, empty=True)] = ""
    """Of the API server; without one it is that of the cluster that the router runs in."""
    token_file: str = ""
    """Read for every question."""
    ca_file: str = ""
    """Authorities to trust for the API server."""

    @field_validator("namespace", "service")
    @classmethod
    def _named(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError(
                f"{value!r} is no name in Kubernetes: write it in small letters, digits and -, as sglang-0"
            )
        return value

    @field_validator("port")
    @classmethod
    def _numbered(cls, value: int | str) -> int | str:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if not (1 <= value <= 65_535 if isinstance(value, int) else not value or _NAME.fullmatch(value)):
            raise ValueError(f"{value!r} is no port: write its number or its name, as 30000 or http")
        return value

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if bool(self.service) == bool(self.selector):
            raise ValueError("set service or selector, one of the two: whose pods are the replicas?")
        if self.selector and not all(map(_REQUIREMENT.fullmatch, _requirements(self.selector))):
            raise ValueError(f"selector {self.selector!r} is none: write it as in app=sglang,tier in (gpu, big)")
        if self.url and not _HTTP.fullmatch(self.url):
            raise ValueError(f"url {self.url!r} is not an API server's: write it as in https://10.0.0.1:6443")
        if self.url and not self.namespace:
            raise ValueError("namespace is to be set where url is: the router's own is of another cluster")
        if self.ca_file:
            replica_context(self.ca_file, "", "", verify=True)
        return self

    @property
    def labels(self) -> str:
        """The selector of the slices."""
        return self.selector or f"kubernetes.io/service-name={self.service}"

    @property
    def name(self) -> str:
        """What it is called in log and metrics."""
        what = "/".join(filter(None, (self.url, self.namespace, self.service or self.selector)))
        return f"kubernetes:{what}" + (f":{self.port}" if self.port else "")


def _requirements(selector: str) -> list[str]:
    """Those of a label selector, without the commas between them."""
    return [each.strip() for each in re.split(r",(?![^(]*\))", selector)]


_DNS_NAME = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")

_SERVER = re.compile(r"\[?[0-9A-Fa-f:.]+(%[^%]+)?\]?:\d+")
"""An address and a port, or nearly."""


class DnsSettings(_Part):
    """Hosts behind a name."""

    name: Annotated[str, _schema(pattern=f"^{_DNS_NAME.pattern}$", maxLength=253)]
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Without one SRV records say it."""
    scheme: Literal["http", "https"] = "http"
    weight: Weight = 1.0
    """Of each host, or of each rank of it."""
    ranks: Ranks = 1
    """Of each host's engine."""
    pool: InPool = ""
    server: Annotated[str, _as(_SERVER, empty=True)] = ""
    """To be asked instead of the system's."""

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        if len(value) > 253 or not _DNS_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is no name in DNS: write it as in sglang.default.svc.cluster.local")
        return value

    @field_validator("server")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value:
            return value
        host, colon, port = value.rpartition(":")
        try:
            ip_address(host.removeprefix("[").removesuffix("]") if colon else value)
            sound = not colon or (port.isdecimal() and 1 <= int(port) <= 65_535)
        except ValueError:
            sound = False
        if not sound or not colon:
            raise ValueError(f"{value!r} is not an address and a port: write it as in 10.0.0.10:53")
        return value

    @property
    def srv_name(self) -> str:
        """Of the SRV records."""
        return self.name if self.name.startswith("_") else f"_{self.scheme}._tcp.{self.name}"

    @property
    def source(self) -> str:
        """What it is called in log and metrics."""
        return f"dns:{self.name}:{self.port}" if self.port else f"dns:{self.srv_name}"


class DiscoverySettings(_Part):
    """Where replicas are found, beside those that are listed."""

    file: str = ""
    """A list as `replicas` has it, read again when it has changed."""
    dns: Annotated[list[DnsSettings], Field(max_length=100)] = []
    kubernetes: Annotated[list[KubernetesSettings], Field(max_length=100)] = []

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [each.source for each in self.dns] + [each.name for each in self.kubernetes]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{min(twice)} is given twice: remove one")
        return self

    @property
    def names(self) -> list[str]:
        """What the sources are called, in their order."""
        file = [f"file:{self.file}"] if self.file else []
        return [*file, *(each.source for each in self.dns), *(each.name for each in self.kubernetes)]


def check_distinct(replicas: Sequence[ReplicaSettings]) -> None:
    """Raises ValueError when a list has a URL or an id twice."""
    known: set[str] = set()
    urls: set[str] = set()
    for replica in replicas:
        if replica.url in urls:
            raise ValueError(f"{replica.url} is given twice: remove one, its weight is its share")
        if twice := known.intersection(replica.ids):
            raise ValueError(f"the id {min(twice)!r} is given twice: give each replica its own")
        known.update(replica.ids)
        urls.add(replica.url)


def pool_fault(pool: str, names: Sequence[str]) -> str:
    """What is wrong with a replica's pool, and what to do; empty when nothing is."""
    if not pool or pool in names:
        return ""
    if not names:
        return f"{cut(repr(pool))} is no pool, as there are none: name it under `pools`, or leave it out"
    near = next(iter(difflib.get_close_matches(pool, names, n=1)), None)
    meant = f"did you mean {near!r}?" if near else f"name one of {', '.join(names)}, or add it under `pools`"
    return f"{cut(repr(pool))} is no pool: {meant}"


def check_pools(pools: Sequence[ModelsSettings]) -> None:
    """Raises ValueError when a name or a pattern is given twice."""
    names: set[str] = set()
    patterns: dict[str, str] = {}
    for number, pool in enumerate(pools):
        if pool.name in names:
            raise ValueError(f"pools.{number}.name: {pool.name!r} is given twice: give each pool its own")
        names.add(pool.name)
        for pattern in pool.models:
            if (holder := patterns.get(pattern.casefold())) is not None:
                raise ValueError(
                    f"pools.{number}.models: {pattern!r} is a pattern of pool {holder} already: remove one"
                )
            patterns[pattern.casefold()] = pool.name


def _listed(value: Any) -> Any:
    """In the environment replicas are written as JSON, or as URLs with commas between."""
    if not isinstance(value, str):
        return value
    return _decoded(value) if value.lstrip().startswith("[") else [url for url in value.split(",") if url.strip()]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text!r} is not JSON: mend it, or write it without brackets") from None


class Settings(BaseSettings):
    """Everything that can be set. Defaults are documented in docs/operations.md."""

    model_config = SettingsConfigDict(env_prefix="WARMROUTE_", env_nested_delimiter="__", extra="forbid", frozen=True)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8080
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that share the data port."""
    admin: AdminSettings = AdminSettings()
    replicas: Annotated[list[ReplicaSettings], NoDecode, BeforeValidator(_listed)] = []
    discovery: DiscoverySettings = DiscoverySettings()
    pools: Annotated[list[ModelsSettings], Field(max_length=MAX_POOLS)] = []
    """The first takes what is no other's. Without any there is one, of all replicas."""
    policy: Annotated[PolicySettings, NoDecode] = PolicySettings()
    directory: DirectorySettings = DirectorySettings()
    identity: IdentitySettings = IdentitySettings()
    limits: LimitSettings = LimitSettings()
    admission: AdmissionSettings = AdmissionSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    pool: PoolSettings = PoolSettings()
    health: HealthSettings = HealthSettings()
    reports: ReportSettings = ReportSettings()
    drain: DrainSettings = DrainSettings()
    reload: ReloadSettings = ReloadSettings()
    admin_paths: AdminPathSettings = AdminPathSettings()
    keys: KeysSettings = KeysSettings()
    tls: TlsSettings = TlsSettings()
    headers: HeadersSettings = HeadersSettings()
    cors: CorsSettings = CorsSettings()
    response_headers: bool = False
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    journal: JournalSettings = JournalSettings()
    store: StoreSettings = StoreSettings()

    @field_validator("*", mode="before")
    @classmethod
    def _not_bool(cls, value: Any, info: ValidationInfo) -> Any:
        return _no_bool(value, cls.model_fields[str(info.field_name)].annotation)

    @model_validator(mode="after")
    def _distinct(self) -> Settings:
        try:
            check_distinct(self.replicas)
        except ValueError as error:
            raise ValueError(f"replicas: {error}") from None
        check_pools(self.pools)
        self._check_members()
        if self.port and self.port == self.admin.port and self.host == self.admin.host:
            raise ValueError(f"admin.port: {self.port} is the data port as well: choose another")
        if self.store.url and not self.identity.secret.get_secret_value():
            raise ValueError(
                "identity.secret is empty, and store.url is set: give all routers the same secret: it keys the digests "
                "that the store holds; `openssl rand -hex 32` makes one"
            )
        if self.workers > 1 and sys.platform != "linux":
            raise ValueError(f"workers: {self.workers} processes on one port need Linux: leave it out here")
        return self

    def _check_members(self) -> None:
        """Raises ValueError when a source puts its replicas into a pool that is none."""
        given: dict[str, Sequence[ReplicaSettings | DnsSettings | KubernetesSettings]] = {
            "replicas": self.replicas,
            "discovery.dns": self.discovery.dns,
            "discovery.kubernetes": self.discovery.kubernetes,
        }
        names = [each.name for each in self.pools]
        faults = [
            f"{where}.{number}.pool: {fault}"
            for where, those in given.items()
            for number, each in enumerate(those)
            if (fault := pool_fault(each.pool, names))
        ]
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def replica_count(self) -> int:
        """How many replicas are listed, each rank of an engine for itself."""
        return sum(replica.ranks for replica in self.replicas)

    @property
    def warnings(self) -> list[str]:
        """What can be so, and is hardly meant."""
        if self.replicas or self.discovery.names:
            return []
        return [
            "there are neither replicas nor discovery: every request will be refused; name a replica with --replica or "
            "under `replicas`"
        ]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Files and the environment are for `router.configuration` to read, so that it can name what is wrong there.
        return (init_settings,)


def normal_url(url: str) -> str:
    """The URL as ids are made of it: scheme and host in lower case, no trailing slash, no default port.

    Raises ValueError naming what is wrong.
    """
    example = "write it as in http://10.0.0.1:30000"
    shown = cut(repr(without_credentials(url := url.strip())))
    if len(url) > MAX_URL_CHARS:
        raise ValueError(f"{shown}: a URL is of up to {MAX_URL_CHARS} characters: {example}")
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError(f"{shown}: only ASCII without spaces can be used: {example}, an international name as xn--...")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}: {example}") from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{shown}: the port must be a number from 1 to 65535")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{shown} is not a replica's URL: {example}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{shown}: leave out user, query and fragment")
    if not _AUTHORITY.fullmatch(parts.netloc):
        raise ValueError(f"{shown}: {parts.netloc!r} is not a host with or without a port: {example}, one URL each")
    host = in_url(parts.hostname)
    default = 443 if parts.scheme == "https" else 80
    return f"{parts.scheme}://{host}{'' if port in (None, default) else f':{port}'}{parts.path.rstrip('/')}"
