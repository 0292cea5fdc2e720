"""Workers that cannot start, or do not for long: what is said of it, and what becomes of those that serve."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

from tests.fakes.wire import eventually
from tests.router.test_cli import ended
from tests.workers.manned import Manned
from tests.workers.test_ending import replaced


async def kill(manned: Manned, number: int) -> None:
    """One worker's process, once there is one, and wait until it is no more."""

    async def pid() -> int | None:
        return manned.pids().get(number)

    found = await manned.until(pid, bool, f"worker {number} is started")
    os.kill(found, signal.SIGKILL)
    await manned.until(pid, lambda now: now != found, f"worker {number} is gone")


async def test_a_worker_whose_keys_are_gone_says_so_in_a_line_and_the_others_go_on(manned: Manned) -> None:
    keys = manned.folder / "keys"
    keys.write_text(f"bob:sha256:{hashlib.sha256(b'k' * 40).hexdigest()}\n")
    await manned.start(keys={"file": str(keys)})
    before = manned.pids()
    moved = keys.rename(manned.folder / "elsewhere")
    await kill(manned, 2)
    log = await manned.logged("worker 2 has ended with 2: started again in 1 s")
    lines = [line for line in log.splitlines() if line.startswith("warmroute: ")]
    assert set(lines) == {
        f"warmroute: worker 2 cannot use the settings in force: '{keys}': No such file or directory:"
        " give a readable text file"
    }
    assert "Traceback" not in log
    await manned.ready()
    moved.rename(keys)
    assert (await replaced(manned, before))[1] == before[1]
    keys.unlink()
    await kill(manned, 2)
    await manned.logged("worker 2 has ended with 2: started again in 4 s")
    manned.router.signal(signal.SIGTERM)
    assert await ended(manned.router) == 0, "who never served has cut nothing off"


async def test_who_cannot_start_does_not_end_those_that_serve(manned: Manned, tmp_path: Path) -> None:
    (tmp_path / "journal.w2").mkdir()  # of the second alone
    for name in "ab":
        await manned.add(name)
    manned.write(journal={"path": str(tmp_path / "journal")})
    await manned.launch()
    manned.hold()
    stream = await manned.open("s")
    log = await manned.logged("worker 2 has ended with 2: started again in 0.5 s")
    assert "journal.path: cannot write" in log
    await manned.ready()
    manned.let_go()
    assert await manned.ends_whole(stream.client)
    (tmp_path / "journal.w2").rmdir()
    await manned.logged("2 workers serve")
    await eventually(lambda: len(manned.pids()) == 2)
