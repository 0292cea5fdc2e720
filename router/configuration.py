"""Reading the configuration: flags over environment over file over defaults, and every fault explained.

A fault is told with its key, its value and a remedy, in one line; nothing here ends in a traceback.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from policies import registry
from router.cutting import cut, written
from router.expectations import expectation, remedy
from router.settings import Settings
from router.token import MIN_TOKEN_CHARS

PREFIX = "WARMROUTE_"

_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
"""What Kubernetes puts into every container for a Service called `warmroute`: not meant for us."""


KeyPath = tuple[str, ...]
"""Of keys, from the top."""


class ConfigError(Exception):
    """A configuration that cannot be used. The message names key, value and remedy, a line for each fault."""


def load(file: str | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read and validate everything. `flags` (the same tree as the file's) win over the environment, it over the file.

    Raises ConfigError, with the faults of all three.
    """
    faults: list[str] = []
    unread: list[KeyPath] = []
    tree: dict[str, Any] = {}
    try:
        try:
            tree = read_file(file) if file is not None else {}
        except ConfigError as error:
            faults.append(str(error))
            unread.append(())
        environment = _environment(faults, unread)
        settings = Settings(**_over(_over(_spelt(tree), environment), _spelt(flags or {})))
    except ValidationError as error:
        faults += (_explain(fault, ()) for fault in error.errors() if _certain(fault, unread))
    except RecursionError:
        faults.append(f"--config {file}: nested too deeply, or an alias that contains itself")
    if faults:
        raise ConfigError("\n".join(faults))
    return settings


def _certain(fault: Any, unread: list[KeyPath]) -> bool:
    """Whether it is a fault whatever was meant by what could not be read, at these keys.

    Of what a section lacks, and of how its keys go together, that cannot be said.
    """
    if fault["type"] not in ("missing", "value_error") or not isinstance(fault["input"], dict):
        return True
    section = tuple(str(part) for part in fault["loc"])
    return not any(section[: len(path)] == path or path[: len(section)] == section for path in unread)


MAX_ALIASED_CHARS = 1_000_000
"""That aliases may add to a text, each written out: a few lines of aliases to aliases are billions."""

MESSAGE_CHARS = 1_000


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not a silent choice of the last one, and aliases are bounded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._chars = self._aliased = 0
        self._sizes: dict[yaml.Node, int] = {}
        """Of nodes that an alias may stand for, with all below them."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._chars
        node: Any = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            size = self._sizes.get(node, 0)  # none yet of what contains itself: that ends by its depth
            self._chars += size
            self._aliased += size
        else:
            self._chars += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            if event.anchor is not None:
                self._sizes[node] = self._chars - before
        if self._aliased > MAX_ALIASED_CHARS:
            fault = f"its aliases stand for more than {MAX_ALIASED_CHARS} characters: write out what is meant"
            raise yaml.composer.ComposerError(None, None, fault, node.start_mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice: remove one", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parsed(text: str) -> Any:
    """What a text in YAML holds. Raises ValueError with the fault in one line."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # The last four are PyYAML's own way of failing on a value that its tag forbids.
        raise ValueError(f"not good YAML: {cut(' '.join(str(error).split()), MESSAGE_CHARS)}") from None


def read_file(file: str) -> dict[str, Any]:
    """The tree in a YAML file. Raises ConfigError."""
    try:
        tree = parsed(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}: give the path of a readable YAML file") from None
    except UnicodeError as error:
        raise ConfigError(f"--config {file}: not good YAML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"--config {file}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {file}: expected a mapping of keys such as `replicas:`, got {type(tree).__name__}")
    return _merged({}, tree)


def _environment(faults: list[str], unread: list[KeyPath]) -> dict[str, Any]:
    """The tree in the environment; variables that cannot be read are added to the faults, with the keys meant."""
    given: dict[str, str] = {}
    for name, value in os.environ.items():
        rest = name.upper().removeprefix(PREFIX)
        if rest == name.upper() or _SERVICE_LINK.fullmatch(rest) or _SERVICE_LINK_VALUE.match(value):
            continue
        path = rest.lower().split("__")
        if (fault := _unknown(path)) is not None:
            faults.append(f"environment variable {name}={_shown(path, value)}: {fault}")
            unread.append(tuple(path[:-1]))  # the last is no key, and a sibling of it may have been meant
            continue
        given[name.lower()] = value
    source = EnvSettingsSource(Settings)
    source.env_vars = given
    tree: dict[str, Any] = {}
    for name in given:  # one by one, so that the one at fault can be named
        source.env_vars = {name: given[name]}
        try:
            tree = _merged(tree, _spelt(source()))
        except SettingsError:
            path = name.removeprefix(PREFIX.lower()).split("__")
            shown = "..." if path[0] in _PUBLIC else repr(given[name])  # it may hold a secret
            faults.append(f"environment variable {name.upper()}={shown}: a list or a mapping is written as JSON")
            unread.append(tuple(path))
    for policy in _policies(tree):
        if isinstance(parameters := policy.get("parameters"), dict):
            policy["parameters"] = {key: scalar(value) for key, value in parameters.items()}
    return tree


def scalar(value: Any) -> Any:
    """A parameter's type is known to its policy alone: a number is taken for one."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _unknown(path: list[str]) -> str | None:
    """Why a path of keys names no setting; None when it does."""
    model: type[BaseModel] = Settings
    for depth, key in enumerate(path):
        if key not in model.model_fields:
            return f"unknown key {'.'.join(path[: depth + 1])!r}{_hint(path[:depth], key, model)}"
        annotation = model.model_fields[key].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None if depth == len(path) - 1 or key == "parameters" else f"{key!r} has no keys below it"
        model = annotation
    return None


def _hint(path: list[str], key: str, model: type[BaseModel]) -> str:
    """The nearest key: a sibling, or one elsewhere whose whole path was meant."""
    known = list(model.model_fields)
    elsewhere = {dotted.replace(".", "_"): dotted for dotted in _dotted(Settings)}
    if near := elsewhere.get("_".join([*path, key])):
        return f": did you mean {near!r} (in the environment {PREFIX}{near.replace('.', '__').upper()})?"
    if near := next(iter(difflib.get_close_matches(key, known, n=1)), None):
        return f": did you mean {'.'.join([*path, near])!r}?"
    if named := [dotted for dotted in elsewhere.values() if dotted.endswith(f".{key}")]:
        return f": did you mean {' or '.join(map(repr, named))}?"
    return f": known keys are {', '.join(known)}"


def _dotted(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _dotted(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def _merged(below: Mapping[str, Any], above: Mapping[Any, Any]) -> dict[str, Any]:
    """`above` over `below`, mapping by mapping; keys become text, as `1:` or `yes:` are not in YAML."""
    out = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            under = out.get(str(key))
            out[str(key)] = _merged(under if isinstance(under, Mapping) else {}, value)
        else:
            out[str(key)] = value
    return out


def _spelt(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with policies that are given by name alone written out."""
    out = dict(tree)
    if "policy" in out:
        policy = out["policy"] = _by_name(out["policy"])
        if isinstance(policy, dict) and "shadow" in policy:
            policy["shadow"] = _by_name(policy["shadow"])
    return out


def _by_name(policy: Any) -> Any:
    if isinstance(policy, str) and not policy.lstrip().startswith("{"):
        return {"name": policy}
    return dict(policy) if isinstance(policy, Mapping) else policy


def _policies(tree: Mapping[str, Any]) -> list[Any]:
    """The policy and its shadow, as far as they are mappings."""
    policy = tree.get("policy")
    shadow = policy.get("shadow") if isinstance(policy, dict) else None
    return [each for each in (policy, shadow) if isinstance(each, dict)]


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One source over another: a policy named above leaves the parameters of the one below."""
    out = _merged(below, above)
    policy, named = out.get("policy"), above.get("policy")
    while isinstance(policy, dict) and isinstance(named, dict):
        if "name" in named:
            policy["parameters"] = named.get("parameters", {})
        policy, named = policy.get("shadow"), named.get("shadow")
    return out


_PUBLIC = {
    "identity": ("rules",),
    "admin": ("host", "port", "token_file", "open", "open_metrics", "tls"),
    "keys": ("file", "max_in_flight", "credential"),
    "store": ("password_file", "ca_file", "cert_file", "key_file", "verify", "prefix", "wait_s", "timeout_s"),
}
"""Sections that hold secrets, and their keys that do not."""


_CREDENTIALS = re.compile(r"//[^\s'\"]*@")
"""Of URLs within a value."""


def _shown(path: list[str], value: object) -> str:
    """A value for a message; in sections with secrets one may stand under a misspelt key, too."""
    public = _PUBLIC.get(path[0])
    if public is None or set(path[1:2]) & set(public):
        return written(value, lambda text: _CREDENTIALS.sub("//***@", text))
    return written(value) if path[0] == "admin" and len(str(value)) < MIN_TOKEN_CHARS else "***"


def explained(error: ValidationError, *under: str) -> Iterator[str]:
    """A line for each fault of settings, or of what stands under these keys of them: key, fault, value, remedy."""
    for fault in error.errors():
        yield _explain(fault, under)


def _explain(fault: Any, under: tuple[str, ...]) -> str:
    path = [*under, *(cut(str(part)) for part in fault["loc"])]
    if path[-1:] in (["int"], ["str"]):  # of what may be either
        del path[-1]
    where = ".".join(path)
    if fault["type"] == "extra_forbidden":
        model: type[BaseModel] = Settings
        for key in path[:-1]:
            if (field := model.model_fields.get(key)) is not None:
                model = _model(field.annotation) or model  # else the number or the name of an entry
        return f"{where}: unknown key, set to {_shown(path, fault['input'])}{_hint(path[:-1], path[-1], model)}"
    kind, value = fault["type"], fault["input"]
    message = expectation(path[-1] if path else "", kind, fault["msg"])
    if kind == "value_error":
        # Of a whole section: what it says may name its keys already.
        return "\n".join(
            cut(line if not where or line.startswith(f"{where}.") else f"{where}: {line}", MESSAGE_CHARS)
            for line in message.splitlines()
        )
    if kind == "missing":
        return f"{where}: {message}"
    shown = "nothing" if value is None else _shown(path, value)
    told = f"{where}: {message}, got {shown}"
    return told if shown == "***" else told + remedy(path[-1] if path else "", kind, value)


def _model(annotation: Any) -> type[BaseModel] | None:
    """The section that a key leads to, or that each of its entries is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model, get_args(annotation))), None)


def masked(settings: Settings) -> dict[str, Any]:
    """The tree in force, with the policy's parameters that were not given, secrets hidden, fit for YAML."""
    tree = settings.model_dump(mode="json")
    if not tree["policy"]["shadow"]["name"]:
        del tree["policy"]["shadow"]
    for policy in _policies(tree):
        policy["parameters"] = registry.parameters(policy["name"]) | policy["parameters"]
    return tree
