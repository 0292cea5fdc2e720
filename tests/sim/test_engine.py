"""Virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.engine import Engine


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0]), max_size=20))
def test_calls_run_in_order_of_time_and_of_asking(times: list[float]) -> None:
    engine = Engine()
    ran: list[tuple[float, int]] = []
    for index, time in enumerate(times):
        engine.at(time, lambda time=time, index=index: ran.append((engine.now, index)))
    engine.run(1.5)
    assert ran == sorted((time, index) for index, time in enumerate(times) if time <= 1.5)
    assert engine.now == 1.5
    engine.run(2.0)
    assert len(ran) == engine.calls == len(times)


def test_what_is_asked_for_the_past_runs_now() -> None:
    engine = Engine()
    ran: list[float] = []
    engine.at(5.0, lambda: engine.at(1.0, lambda: ran.append(engine.now)))
    engine.at(5.0, lambda: engine.after(2.0, lambda: ran.append(engine.now)))
    engine.run(10.0)
    assert ran == [5.0, 7.0]
