"""A pod without a cluster: its files as the kubelet would mount them, and its container's environment."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.charts import Release

OTHERS: dict[str, Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Pod:
    """What is in it, below a folder that stands for the root of its file system."""

    root: Path
    env: dict[str, str]
    command: list[str]
    args: list[str]

    @property
    def config(self) -> Path:
        """The file that `--config` names."""
        return Path(self.args[self.args.index("--config") + 1])


def pod(
    release: Release, root: Path, given: Mapping[str, Mapping[str, str]] = OTHERS, component: str = "router"
) -> Pod:
    """Mounted below `root`, which paths in configuration, arguments and environment then begin with.

    `given` are Secrets that somebody else has made. KeyError for what is in none, as the kubelet would wait for it.
    """
    secrets: dict[str, Mapping[str, str]] = dict(given)
    for secret in release.of("Secret"):
        texts = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
        secrets[secret["metadata"]["name"]] = texts
    maps = {each["metadata"]["name"]: each["data"] for each in release.of("ConfigMap")}

    spec = release.one("Deployment", component)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        folder = root / mount["mountPath"].lstrip("/")
        folder.mkdir(parents=True)
        for name, content in _files(volumes[mount["name"]], maps, secrets).items():
            (folder / name).write_text(_moved(content, root))
    env = {}
    for variable in container.get("env", ()):
        if "value" in variable:
            env[variable["name"]] = _moved(variable["value"], root)
        else:
            key = variable["valueFrom"]["secretKeyRef"]
            env[variable["name"]] = secrets[key["name"]][key["key"]]
    return Pod(root, env, container["command"], [_moved(each, root) for each in container["args"]])


def _files(
    volume: Mapping[str, Any], maps: Mapping[str, Mapping[str, str]], secrets: Mapping[str, Mapping[str, str]]
) -> Mapping[str, str]:
    """Of one volume, by name."""
    if "configMap" in volume:
        return maps[volume["configMap"]["name"]]
    if "secret" in volume:
        texts = secrets[volume["secret"]["secretName"]]
        items = volume["secret"].get("items")
        return {item["path"]: texts[item["key"]] for item in items} if items else texts
    if "projected" in volume:
        sources = [source["secret"] for source in volume["projected"]["sources"]]
        return {item["path"]: secrets[each["name"]][item["key"]] for each in sources for item in each["items"]}
    return {}


def _moved(text: str, root: Path) -> str:
    return text.replace("/etc/", f"{root}/etc/").replace("/var/", f"{root}/var/")
