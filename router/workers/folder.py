"""The folder of the sockets between a supervisor and its workers. Nobody else can enter it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from router.listening import CannotListen

PREFIX = "warmroute-workers-"

MAX_PATH = 90
"""Characters of its path, so that the whole of a socket's fits the 108 of sockaddr_un."""

NEW_S = 10.0
"""So young a folder is left alone: it is made first and locked then."""


@contextlib.contextmanager
def sockets_folder() -> Iterator[Path]:
    """It, for as long as it is needed. Raises CannotListen.

    It is locked meanwhile. The kernel takes the lock from a supervisor that was killed: the next one tidies up.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
    except OSError as error:
        raise CannotListen(
            f"no folder for the workers' sockets can be made: {error}: set TMPDIR to one that can be written"
        ) from None
    with folder as name:
        if len(name) > MAX_PATH:
            raise CannotListen(f"no socket can be made in {name}: its path is too long: set TMPDIR to a shorter one")
        with _opened(name) as descriptor:
            with contextlib.suppress(OSError):  # of a file system without locks: nobody will lock it then to remove it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            _remove_left(Path(name).parent)
            yield Path(name)


def _remove_left(parent: Path) -> None:
    """Those of supervisors that live no more, as far as they can be removed."""
    for folder in parent.glob(f"{PREFIX}*"):
        # Locked: of one that lives. Not to be opened: of somebody else, or removed by the next one meanwhile.
        with contextlib.suppress(OSError), _opened(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > NEW_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: str | Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
