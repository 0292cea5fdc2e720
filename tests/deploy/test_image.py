"""The image: what its Dockerfile says, and what comes of its steps, carried out in a folder without an engine."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.licences import pins
from tests.deploy.dockerfile import DOCKERFILE, Image, assigned, ignored, stages
from tests.fakes.process import ROOT, Process, free_port
from tests.fakes.wire import LIMIT_S

STAGES = stages(DOCKERFILE.read_text())
*OTHERS, LAST = STAGES
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
NEEDED = {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "policies", "router", "sim"}
"""By the build of the wheel."""


# What it says


def test_it_starts_from_a_python_of_one_version() -> None:
    (base,) = {stage.base for stage in STAGES}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base), base
    labels = assigned(LAST.of("LABEL")[-1])
    assert labels["org.opencontainers.image.base.name"] == f"docker.io/library/{base}"


def test_it_says_which_version_it_is() -> None:
    (version,) = [each.text for each in LAST.of("ARG") if each.text.startswith("VERSION")]
    assert version == f"VERSION={VERSION}"
    labels = assigned(LAST.of("LABEL")[-1])
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]
    assert f"--tag warmroute:{VERSION} " in DOCKERFILE.read_text()


def test_it_runs_as_a_number_that_is_not_root() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", LAST.of("USER")[-1].text)
    after = LAST.instructions[LAST.instructions.index(LAST.of("USER")[-1]) :]
    assert not {each.name for each in after} & {"RUN", "COPY", "ADD"}


def test_commands_are_run_without_a_shell() -> None:
    """So that SIGTERM reaches the router."""
    assert LAST.of("ENTRYPOINT")[-1].words == ["warmroute"]
    assert LAST.of("CMD")[-1].words
    (health,) = LAST.of("HEALTHCHECK")
    assert health.text.startswith("CMD [")
    assert not re.search(r"\b(curl|wget)\b", health.text)


def test_only_what_is_pinned_and_hashed_is_downloaded() -> None:
    assert not any(stage.of("ADD") for stage in STAGES)
    runs = [each.text for stage in STAGES for each in stage.of("RUN")]
    fetching = [run for run in runs if not re.search(r"--no-index|-m venv", run)]
    assert len(fetching) == 2
    for run in fetching:
        assert re.fullmatch(
            r"python -m pip (--python \S+ )?install --require-hashes --only-binary :all: -r requirements/\w+\.txt", run
        )


def test_no_code_is_found_in_the_folder_that_it_is_started_in() -> None:
    given = {name: value for each in LAST.of("ENV") for name, value in assigned(each).items()}
    assert (given["PYTHONSAFEPATH"], given["PYTHONDONTWRITEBYTECODE"]) == ("1", "1")


def test_nothing_goes_into_the_build_but_what_the_wheel_is_made_of() -> None:
    copied = {name for stage in OTHERS for each in stage.of("COPY") for name in each.text.split()[:-1]}
    assert copied == NEEDED | {"requirements/build.txt", "requirements/image.txt"}
    assert not [name for name in copied if not (ROOT / name).exists() or ignored(name)]
    others = {path.name for path in ROOT.iterdir()} - NEEDED - {"requirements"}
    assert not [name for name in others if not ignored(name)]
    assert ignored("requirements/lock.txt")
    assert ignored("router/proxy/__pycache__/x.cpython-311.pyc")
    assert not ignored("sim/data/aic_kimi_b200/SOURCE.md")


# The lists of what is installed


def _pins(name: str) -> dict[str, str]:
    """Of a list in requirements/: package and all that is said of it."""
    text = (ROOT / f"requirements/{name}.txt").read_text()
    blocks = re.findall(r"^[a-z0-9].*\n(?: .*\n)*", text, re.M)
    return {str(canonicalize_name(re.split(r"[=\[ ]", block, maxsplit=1)[0])): block for block in blocks}


def _needed(requirements: list[str], where: dict[str, str]) -> set[str]:
    """What has to be there for these, by what is installed here says of itself."""
    todo = [(Requirement(each), frozenset[str]()) for each in requirements]
    done = set()
    while todo:
        requirement, extras = todo.pop()
        asked = (str(canonicalize_name(requirement.name)), frozenset(requirement.extras))
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({**where, "extra": extra}) for extra in extras or {""}
        )
        if wanted and asked not in done:
            done.add(asked)
            with suppress(metadata.PackageNotFoundError):  # not needed here
                below = map(Requirement, metadata.requires(requirement.name) or ())
                todo += [(each, asked[1]) for each in below]
    return {name for name, _ in done}


RUNNING = [
    *PROJECT["project"]["dependencies"],
    *(each for name, extra in PROJECT["project"]["optional-dependencies"].items() if name != "plots" for each in extra),
]
"""What the image holds: all but what draws the simulator's pictures."""


@pytest.mark.parametrize("python", ["3.11.0", "3.11.14", "3.13.0", "3.14.0"])
@pytest.mark.parametrize(("name", "asked"), [("image", RUNNING), ("build", PROJECT["build-system"]["requires"])])
def test_a_list_has_what_each_python_needs_in_the_versions_that_the_tests_run_with(
    name: str, asked: list[str], python: str
) -> None:
    where = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    listed, tested = pins(name, where), pins("lock", where)
    assert set(listed) == _needed(asked, where)
    assert {package: tested[package] for package in listed} == listed
    assert all("--hash=sha256:" in block for block in _pins(name).values())


# What comes of its steps


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"))


def _inside(image: Image, *command: str) -> list[str]:
    """As an engine would run it: with the image's environment and none other, as its user where this system can name
    one, and with nothing to be written but the four bytes by which Python finds out whether `/tmp` can be."""
    user, _, group = LAST.of("USER")[-1].text.partition(":")
    other = ["unshare", "--user", f"--map-user={user}", f"--map-group={group}"]
    can = shutil.which("unshare") and subprocess.run([*other, "true"], capture_output=True, check=False).returncode == 0
    variables = [f"{name}={value}" for name, value in image.environment.items()]
    # Both outputs go through a pipe: standard error would be a file, and of no use.
    quiet = ["sh", "-c", 'exec "$@" 2>&1', "sh", "prlimit", "--fsize=4"]
    return [*(other if can else ()), "env", "-i", "-C", "/", *variables, *quiet, *command]


def test_it_holds_what_is_listed_and_warmroute_and_nothing_else(image: Image) -> None:
    (packages,) = image.path("/opt/warmroute/lib").glob("*/site-packages")
    found = {str(canonicalize_name(each.name)): each.version for each in metadata.distributions(path=[str(packages)])}
    assert found == pins("image") | {"warmroute": VERSION}
    assert list(packages.glob("router/__pycache__/cli.*.pyc")), "compiled: a root that is read only stays so"


def test_it_serves_writes_nothing_tells_its_health_and_ends_in_order(image: Image, tmp_path: Path) -> None:
    port, admin_port, replica = free_port(), free_port(), free_port()
    healthy = _inside(image, *(word.replace("8081", str(admin_port)) for word in image.healthcheck))
    serve = [*image.command, "--port", str(port), "--admin-port", str(admin_port)]
    emulator = _inside(image, "python", "-m", "sim.emulator", "--port", str(replica))
    with (
        Process(emulator, tmp_path / "emulator.log") as engine,
        Process(_inside(image, *serve, "--replica", f"http://127.0.0.1:{replica}"), tmp_path / "router.log") as router,
    ):
        engine.wait_line(lambda line: line.startswith("ready"), LIMIT_S)
        router.wait_ok(f"http://127.0.0.1:{admin_port}/readyz", LIMIT_S)
        assert subprocess.run(healthy, check=False).returncode == 0
        asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, trust_env=False, timeout=LIMIT_S
        )
        assert answer.status_code == 200
        router.signal(signal.SIGTERM)
        assert router.wait_end(LIMIT_S) == 0, router.tail()
    assert subprocess.run(healthy, capture_output=True, check=False).returncode != 0


def test_several_workers_write_nothing_either(image: Image, tmp_path: Path) -> None:
    """Sockets in a folder of `/tmp`, which compose.yaml mounts for them, are all that they need."""
    port, admin_port = free_port(), free_port()
    serve = [*image.command, "--port", str(port), "--admin-port", str(admin_port), "--workers", "2"]
    with Process(_inside(image, *serve, "--replica", "http://127.0.0.1:1"), tmp_path / "router.log") as router:
        router.wait_ok(f"http://127.0.0.1:{admin_port}/livez", LIMIT_S)
        router.signal(signal.SIGTERM)
        assert router.wait_end(LIMIT_S) == 0, router.tail()
