"""Where a running router's configuration comes from: a file, whose content tells whether there is news."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from router.aside import aside
from router.configuration import ConfigError
from router.settings import ReloadSettings, Settings


class Source:
    """The file that `--config` names, with environment and flags over it."""

    def __init__(self, file: str, load: Callable[[], Settings], read: bytes | None = None) -> None:
        """`load` reads and validates all of them; raises ConfigError. `read` is the digest of what was read before."""
        self.file = file
        self._load = load
        self.digest = read
        """Of what was there when it was last read."""
        self._seen = read

    def read(self) -> Settings:
        """The configuration as it is now. Raises ConfigError."""
        if Path(self.file).exists() and not (Path(self.file).is_file() or Path(self.file).is_dir()):
            raise ConfigError(f"--config {self.file}: a pipe or device, and it is read more than once: give a file")
        self.digest = self._seen = self._digest()
        return self._load()

    async def changes(self, settings: Callable[[], ReloadSettings]) -> AsyncIterator[None]:
        """One item each time that the file has changed, looked for as the settings in force say."""
        while True:
            reload = settings()
            await asyncio.sleep(reload.interval_s)
            if reload.watch and await aside(self.changed):
                yield

    def changed(self) -> bool:
        """Whether the file holds something else than was read last, and the same as when this was last asked.

        The second is for files that are being written: half of one must not be taken for all of it. The content alone
        decides, whatever link leads there: times do not change with a Kubernetes ConfigMap's content, or do without.
        """
        digest = self._digest()
        settled, self._seen = digest == self._seen, digest
        return settled and digest is not None and digest != self.digest

    def _digest(self) -> bytes | None:
        try:
            if not Path(self.file).is_file():
                return None  # a pipe would be waited for
            return hashlib.sha256(Path(self.file).read_bytes()).digest()
        except OSError:
            return None  # as between two links: what comes next is what counts
