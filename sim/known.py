"""Which pages were ever computed, anywhere: by that it is judged what a request had to compute anew."""

from __future__ import annotations

from collections.abc import Sequence

from sim.client import Thread
from sim.workload import Turn
from sim.workload.pages import COMMON_PAGES


class Known:
    """A session's pages are forgotten with it; those common to sessions are kept."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._common: set[int] = set()

    def has(self, thread: Thread, page: int) -> bool:
        """Whether the page was ever computed. Names are chained: if it was, so were all before it."""
        return page in thread.ever or page in self._common

    def count(self, thread: Thread, turn: Turn) -> int:
        """Leading pages of the prompt that were ever computed; the last token's is not counted, as it never hits."""
        pages = turn.pages
        low, high = 0, min((turn.prompt_tokens - 1) // self._page_tokens, len(pages))
        guess = min(thread.held, high)
        if guess and self.has(thread, pages[guess - 1]):
            low = guess
            if low < high and not self.has(thread, pages[low]):
                return low
        while low < high:
            middle = (low + high + 1) // 2
            if self.has(thread, pages[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, thread: Thread, pages: Sequence[int]) -> None:
        """These were computed for it."""
        thread.ever.update(pages)
        if pages and pages[0] < COMMON_PAGES:
            self._common.update([page for page in pages if page < COMMON_PAGES])
