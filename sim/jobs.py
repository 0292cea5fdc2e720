"""Runs to be done, by several processes."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TypeVar

from policies import registry
from sim import scenario as scenarios
from sim.scenario import Scenario
from sim.scenario_file import nearest

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with the parameters that are not at their defaults."""

    policy: str
    parameters: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As it is written on the command line."""
        return ":".join([self.policy, *(f"{key}={value}" for key, value in self.parameters.items())])


def candidates(text: str) -> list[Candidate]:
    """From `NAME` or `NAME:KEY=VALUE:KEY=VALUE`, several separated by commas. ValueError names what is wrong."""
    found = []
    for part in text.split(","):
        name, *pairs = part.split(":")
        if name not in registry.POLICIES:
            raise ValueError(f"no policy {name!r}; {nearest(name, tuple(registry.POLICIES))}")
        parameters: dict[str, object] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise ValueError(f"{part!r}: a parameter is written {name}:KEY=VALUE, got {pair!r}")
            if key in parameters:
                raise ValueError(f"{part!r}: {key} is given twice: leave one out")
            parameters[key] = _scalar(value)
        registry.make(name, parameters)
        found.append(Candidate(name, parameters))
    if len({candidate.label for candidate in found}) < len(found):
        raise ValueError(f"{text!r}: a policy is named twice: leave one out")
    return found


def _scalar(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    scenario: Scenario
    candidate: Candidate
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run."""

    job: Job
    figures: Mapping[str, object]
    """Of `Measure.result`."""
    waits: Sequence[float]
    """Seconds to the first token of every request counted."""
    history: Sequence[tuple[float, Mapping[str, int]]]
    """Every ten seconds: the time, and the requests in flight by replica."""

    def value(self, key: str) -> float:
        """A figure that is a number; 0 when the run has none of that name."""
        value = self.figures.get(key, 0)
        assert isinstance(value, int | float)
        return float(value)

    def row(self) -> dict[str, object]:
        """Everything about the run on one line."""
        scenario, candidate = self.job.scenario, self.job.candidate
        return {
            "policy": candidate.policy,
            "parameters": dict(candidate.parameters),
            "scenario": scenario.name,
            "seed": self.job.seed,
            "load": scenario.load,
            "replicas": scenario.replicas,
            **dict(scenario.varied),
            **self.figures,
        }


def run(job: Job) -> Result:
    """One run, here and now."""
    world = scenarios.run(job.scenario, job.seed, job.candidate.policy, job.candidate.parameters)
    measure = world.measure
    result = Result(
        job, {**measure.result(), "sessions": world.live, **world.gates()}, tuple(measure.waits), measure.history
    )
    del world
    gc.collect()  # a world is full of cycles, and the collector's own pace would leave a gigabyte of them
    return result


def run_all(function: Callable[[T], R], each: Sequence[T], processes: int) -> Iterator[R]:
    """What a function that can be pickled makes of each, in that order, by so many processes.

    Raises ChildProcessError when one of them was killed.
    """
    if min(processes, len(each)) <= 1:
        yield from map(function, each)
        return
    # Not by forking: a progress bar may have a thread.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(each)), context, _quiet)
    try:
        # A worker that is interrupted before it has begun `_quiet` would complain.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            # Not `pool.map`: when interrupted it cancels what is left, and a broken pool then stumbles over it.
            futures = [pool.submit(function, one) for one in each]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for future in futures:
            yield future.result()
    except BaseException as error:
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError("a process was killed, perhaps for want of memory: try fewer --jobs") from None
        raise
    finally:
        pool.shutdown()


def _quiet() -> None:
    """In a worker: an interrupt ends it at once and without a word; what there is to say the parent says. When that is
    gone, killed perhaps, nobody would ever stop the worker."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell has it for what it starts in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
