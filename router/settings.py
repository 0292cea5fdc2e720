"""The only schema of configuration: YAML file, environment and flags, validated whole."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from policies import registry

PREFIX = "WARMROUTE_"

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65_535)]


class ConfigError(Exception):
    """A configuration that cannot be used. The message names key, value and remedy, a line for each fault."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AdminSettings(_Part):
    host: str = "127.0.0.1"
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


class PolicySettings(_Part):
    name: str = "session_affinity"
    parameters: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return json.loads(value) if value.lstrip().startswith("{") else {"name": value}
        return value

    @model_validator(mode="after")
    def _exists(self) -> PolicySettings:
        registry.make(self.name, self.parameters)
        return self


class DirectorySettings(_Part):
    max_sessions: Annotated[int, Field(ge=1)] = 200_000
    idle_s: Seconds = 3600.0


class IdentitySettings(_Part):
    rules: list[dict[str, Any]] | None = None
    secret: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _parse(self) -> IdentitySettings:
        from router.identity import parse_rules

        parse_rules(self.rules or [])
        return self


class LimitSettings(_Part):
    header_bytes: Bytes = 65_536
    body_bytes: Bytes = 67_108_864
    body_memory_bytes: Bytes = 1_073_741_824
    connections: Annotated[int, Field(ge=1)] = 16_384


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
    budget_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    budget_burst: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0


class PoolSettings(_Part):
    idle_s: Seconds = 3.0


class HealthSettings(_Part):
    interval_s: Seconds = 1.0
    timeout_s: Seconds = 2.0
    deep_interval_s: Seconds = 15.0
    deep_timeout_s: Seconds = 25.0
    fail_after: Annotated[int, Field(ge=1)] = 3
    pass_after: Annotated[int, Field(ge=1)] = 2
    passive_fail_after: Annotated[int, Field(ge=1)] = 3


class ReportSettings(_Part):
    interval_s: Seconds = 1.0
    timeout_s: Seconds = 2.0


class DrainSettings(_Part):
    delay_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 600.0


class AdminPathSettings(_Part):
    allow: list[str] = []


class LogSettings(_Part):
    format: Literal["auto", "json", "text"] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lambda v: str(v).lower())] = "info"


def _listed(value: Any) -> Any:
    """In the environment replicas are written as JSON, or as URLs with commas between."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("[") else [url for url in value.split(",") if url.strip()]


class Settings(BaseSettings):
    """Everything that can be set. Defaults are documented in docs/operations.md."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
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

    @model_validator(mode="after")
    def _distinct(self) -> Settings:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.id in seen:
                raise ValueError(f"replicas: {replica.id!r} is given twice: remove one, or give them different ids")
            seen.add(replica.id)
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
        # The file is merged below the environment by `load`; .env files and secret directories are not read.
        return (init_settings, env_settings)


def normal_url(url: str) -> str:
    """The URL without trailing slash, its host in lower case. Raises ValueError naming what is wrong."""
    parts = urlsplit(url.strip())
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{url!r}: the port must be a number from 1 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{url!r} is not a replica's URL: write it as in http://10.0.0.1:30000")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url!r}: leave out user, query and fragment")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def load(file: str | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read and validate everything. `flags` (the same tree as the file's) win over the environment, it over the file.

    Raises ConfigError.
    """
    tree = read_file(file) if file is not None else {}
    env = _environment()
    try:
        return Settings(**_merged(_merged(tree, env), flags or {}))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault) for fault in error.errors())) from None


def read_file(file: str) -> dict[str, Any]:
    """The tree in a YAML file. Raises ConfigError."""
    try:
        tree = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}: give the path of a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {file}: expected a mapping of keys such as `replicas:`, got {type(tree).__name__}")
    return tree


def _environment() -> dict[str, Any]:
    """The tree in the environment. Raises ConfigError for a variable that nothing reads."""
    for name in os.environ:
        if name.upper().startswith(PREFIX):
            path = name.upper().removeprefix(PREFIX).lower().split("__")
            if (fault := _unknown(path)) is not None:
                raise ConfigError(f"environment variable {name}: {fault}")
    try:
        return dict(EnvSettingsSource(Settings)())
    except Exception as error:
        raise ConfigError(f"environment: {error}: lists and mappings are written as JSON") from None


def _unknown(path: list[str]) -> str | None:
    """Why a path of keys names no setting; None when it does."""
    model: type[BaseModel] = Settings
    for depth, key in enumerate(path):
        if key not in model.model_fields:
            return f"unknown key {'.'.join(path[: depth + 1])!r}{_hint(key, list(model.model_fields))}"
        annotation = model.model_fields[key].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None if depth == len(path) - 1 or key in ("parameters", "rules") else f"{key!r} has no keys below it"
        model = annotation
    return None


def _hint(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f": known keys are {', '.join(known)}"


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = _merged(out[key], value)
        else:
            out[key] = value
    return out


def _explain(fault: Any) -> str:
    """One fault as a line: key, what is wrong, value, remedy."""
    path = [str(part) for part in fault["loc"]]
    where = ".".join(path)
    if fault["type"] == "extra_forbidden":
        model: type[BaseModel] = Settings
        for key in path[:-1]:
            field = model.model_fields.get(key)
            annotation = field.annotation if field is not None else ReplicaSettings
            model = (
                annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else ReplicaSettings
            )
        known = list(model.model_fields)
        return f"{where}: unknown key{_hint(path[-1], known)}"
    message = fault["msg"].removeprefix("Value error, ")
    if not where:
        return str(message)
    if fault["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where}: {message}, got {fault['input']!r}"


def masked(settings: Settings) -> dict[str, Any]:
    """The tree in force, secrets hidden, fit for YAML."""
    return settings.model_dump(mode="json")
