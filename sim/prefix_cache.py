"""The KV pool of one replica: pages in use by requests, and pages cached for reuse in a radix tree.

Pages are named by *chained* hashes: a page's hash covers everything before it too. So two sequences that agree in
page i agree in all pages before i, and a common prefix is found by looking at ends instead of comparing tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Node:
    """A run of pages that were stored together, below the pages of its parents."""

    __slots__ = ("children", "pages", "parent", "pins", "used")

    def __init__(self, pages: Sequence[int], parent: Node | None) -> None:
        self.pages = pages
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.pins = 0
        """Running requests whose prompt goes through this node; never evicted while above 0."""
        self.used = 0
        """Tick of the last request that went through this node."""


class PrefixCache:
    """Page-granular prefix cache with least-recently-used eviction, as SGLang's radix cache.

    Eviction drops whole leaves, oldest first, which is what the recorded BlockRemoved events of SGLang 0.5.23 show.
    """

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self.allocated_pages = 0
        """Pages that requests own and that are not (yet) in the tree."""
        self.cached_pages = 0
        """Pages in the tree."""
        self.pinned_pages = 0
        """Of the cached pages, those no eviction may take."""
        self._root = Node((), None)
        self._leaves: set[Node] = set()
        self._tick = 0

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.capacity_pages - self.allocated_pages - self.cached_pages

    @property
    def evictable_pages(self) -> int:
        """Cached pages that may be dropped to make room."""
        return self.cached_pages - self.pinned_pages

    def match(self, pages: Sequence[int], limit: int) -> tuple[Node, int]:
        """The deepest node on the way of `pages[:limit]`, and how many of them are cached. Counts as a use."""
        self._tick += 1
        node, done = self._root, 0
        while done < limit:
            child = node.children.get(pages[done])
            if child is None:
                break
            common = _common(child.pages, pages, done, limit)
            if common < len(child.pages):
                child = self._split(child, common)
            node = child
            node.used = self._tick
            done += common
        return node, done

    def pin(self, node: Node) -> None:
        """Keeps the node and all above it from eviction, until unpinned as often."""
        step: Node | None = node
        while step is not None:
            if step.pins == 0:
                self.pinned_pages += len(step.pages)
            step.pins += 1
            step = step.parent

    def unpin(self, node: Node) -> None:
        """Undoes one `pin`."""
        step: Node | None = node
        while step is not None:
            step.pins -= 1
            if step.pins == 0:
                self.pinned_pages -= len(step.pages)
            step = step.parent

    def allocate(self, count: int) -> bool:
        """Takes pages for a request, evicting what must go; False and no change when there are not enough."""
        if count > self.free_pages + self.evictable_pages:
            return False
        self._evict(count - self.free_pages)
        self.allocated_pages += count
        return True

    def release(self, count: int) -> None:
        """Gives back pages taken with `allocate`."""
        self.allocated_pages -= count

    def insert(self, pages: Sequence[int], count: int, handed: int) -> Node:
        """Stores `pages[:count]`, the last `handed` of which the caller has allocated and now gives away.

        Those stored by another request in the meantime are freed. Returns the node of the last page.
        """
        node, done = self.match(pages, count)
        if done < count:
            child = Node(list(pages[done:count]), node)
            child.used = self._tick
            node.children[pages[done]] = child
            self._leaves.discard(node)
            self._leaves.add(child)
            self.cached_pages += count - done
            node = child
        self.allocated_pages -= handed
        return node

    def clear(self) -> None:
        """Drops everything that is not pinned."""
        self._evict(self.evictable_pages)

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        heap = [(leaf.used, id(leaf), leaf) for leaf in self._leaves if leaf.pins == 0]
        heapq.heapify(heap)
        while count > 0:
            leaf = heapq.heappop(heap)[2]
            count -= len(leaf.pages)
            self.cached_pages -= len(leaf.pages)
            self._leaves.discard(leaf)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.pages[0]]
            if not parent.children and parent.parent is not None:
                self._leaves.add(parent)
                if parent.pins == 0:
                    heapq.heappush(heap, (parent.used, id(parent), parent))

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node in two after `at` pages and returns the upper part."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.pages[:at], parent)
        upper.pins = node.pins
        upper.used = node.used
        parent.children[upper.pages[0]] = upper
        node.pages = node.pages[at:]
        node.parent = upper
        upper.children[node.pages[0]] = node
        return upper


def _common(run: Sequence[int], pages: Sequence[int], offset: int, limit: int) -> int:
    """How many pages of `run` equal `pages[offset:limit]`; the first is known to."""
    low, high = 1, min(len(run), limit - offset)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == pages[offset + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
