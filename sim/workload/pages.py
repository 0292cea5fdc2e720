"""Names of KV pages."""

from __future__ import annotations

from typing import Final

COMMON_PAGES: Final = 1 << 32
"""Pages with lower names may be met in several sessions; others belong to one."""


class Pages:
    """Makes the names of KV pages. A new page gets a new name, so names are chained hashes without any hashing."""

    def __init__(self, page_size: int, session: int) -> None:
        self.size = page_size
        self._fresh = (session + 1) * COMMON_PAGES

    def grow(self, pages: list[int], tokens: int) -> None:
        """Adds pages until they cover the whole pages of `tokens`."""
        missing = tokens // self.size - len(pages)
        if missing > 0:
            pages += range(self._fresh, self._fresh + missing)
            self._fresh += missing

    def common(self, tokens: int, kind: int) -> list[int]:
        """The pages of a beginning that all sessions of a kind share."""
        first = 1 + (kind << 12)
        return list(range(first, first + tokens // self.size))
