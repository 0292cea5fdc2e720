"""The only schema of configuration: every key, its type, its bounds and its default."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
from router.identity import parse_rules

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65_535)]

_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\])(:\d*)?")
"""A name or an address, IPv6 in brackets, and a port. Python's parser takes nearly anything for a host."""

_ID = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces: an id goes into headers, metric labels and log lines."""


def _no_bool(value: Any, annotation: object) -> Any:
    # `port: yes` would be port 1.
    if isinstance(value, bool) and annotation is not bool:
        raise ValueError(f"{str(value).lower()} is neither a number nor a text: write a value, in quotes if need be")
    return value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _not_bool(cls, value: Any, info: ValidationInfo) -> Any:
        return _no_bool(value, cls.model_fields[str(info.field_name)].annotation)


class AdminSettings(_Part):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8081


class ReplicaSettings(_Part):
    """A replica: its URL, a stable name (the URL unless given), and its share of traffic for policies that heed it."""

    url: str
    id: str = ""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0

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
            raise ValueError(f"{value!r}: use up to 256 letters, digits and signs of ASCII, without spaces")
        return value


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


class IdentitySettings(_Part):
    rules: list[dict[str, Any]] | None = None
    secret: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _parse(self) -> IdentitySettings:
        parse_rules(self.rules or [])
        if set(self.secret.get_secret_value()) == {"*"}:
            raise ValueError("secret is the mask that check-config prints: put the secret itself in its place")
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
    interval_s: Seconds = 1.0
    timeout_s: Seconds = 2.0
    deep_interval_s: Seconds = 15.0
    deep_timeout_s: Annotated[float, Field(gt=1, le=86_400, allow_inf_nan=False)] = 25.0
    """More than 1: SGLang looks only once a second whether `/health` has been answered."""
    fail_after: Annotated[int, Field(ge=1)] = 3
    pass_after: Annotated[int, Field(ge=1)] = 2
    passive_fail_after: Annotated[int, Field(ge=1)] = 3


class ReportSettings(_Part):
    interval_s: Seconds = 1.0
    timeout_s: Seconds = 2.0


class DrainSettings(_Part):
    delay_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0.0
    grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 600.0


class AdminPathSettings(_Part):
    allow: list[str] = []


class LogSettings(_Part):
    format: Literal["auto", "json", "text"] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lambda v: str(v).lower())] = "info"


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
    admin: AdminSettings = AdminSettings()
    replicas: Annotated[list[ReplicaSettings], NoDecode, BeforeValidator(_listed)] = []
    policy: Annotated[PolicySettings, NoDecode] = PolicySettings()
    directory: DirectorySettings = DirectorySettings()
    identity: IdentitySettings = IdentitySettings()
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    pool: PoolSettings = PoolSettings()
    health: HealthSettings = HealthSettings()
    reports: ReportSettings = ReportSettings()
    drain: DrainSettings = DrainSettings()
    admin_paths: AdminPathSettings = AdminPathSettings()
    response_headers: bool = False
    log: LogSettings = LogSettings()

    @field_validator("*", mode="before")
    @classmethod
    def _not_bool(cls, value: Any, info: ValidationInfo) -> Any:
        return _no_bool(value, cls.model_fields[str(info.field_name)].annotation)

    @model_validator(mode="after")
    def _distinct(self) -> Settings:
        ids: set[str] = set()
        urls: set[str] = set()
        for replica in self.replicas:
            if replica.url in urls:
                raise ValueError(f"replicas: {replica.url} is given twice: remove one, its weight is its share")
            if replica.id in ids:
                raise ValueError(f"replicas: the id {replica.id!r} is given twice: give each replica its own")
            ids.add(replica.id)
            urls.add(replica.url)
        if self.port and self.port == self.admin.port and self.host == self.admin.host:
            raise ValueError(f"admin.port: {self.port} is the data port as well: choose another")
        return self

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
    if not re.fullmatch(r"[!-~]+", url := url.strip()):
        raise ValueError(f"{url!r}: only ASCII without spaces can be used: {example}, an international name as xn--...")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}: {example}") from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{url!r}: the port must be a number from 1 to 65535")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a replica's URL: {example}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{url!r}: leave out user, query and fragment")
    if not _AUTHORITY.fullmatch(parts.netloc):
        raise ValueError(f"{url!r}: {parts.netloc!r} is not a host with or without a port: {example}, one URL each")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    default = 443 if parts.scheme == "https" else 80
    return f"{parts.scheme}://{host}{'' if port in (None, default) else f':{port}'}{parts.path.rstrip('/')}"
