"""The KV pool of one replica: pages in use by requests, and pages cached for reuse in a radix tree.

Pages are named by *chained* hashes: a page's hash covers everything before it too. So two sequences that agree in
page i agree in all pages before i, and a common prefix is found by looking at ends instead of comparing tokens.

With a host tier the same tree covers both: whatever is stored is written through to the host at once, and what the
GPU drops stays in the tree as long as the host has room.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Node:
    """A run of pages that were stored together, below the pages of its parents."""

    __slots__ = ("children", "listed", "on_gpu", "on_gpu_children", "pages", "parent", "pins", "serial", "used")

    def __init__(self, pages: Sequence[int], parent: Node | None, serial: int, used: int = 0) -> None:
        self.pages = pages
        self.parent = parent
        self.serial = serial
        """Orders nodes of the same tick, so that runs can be repeated."""
        self.children: dict[int, Node] = {}
        self.on_gpu = True
        """In GPU memory. If it is, so are its parents; what is not is in the host tier."""
        self.on_gpu_children = 0
        self.pins = 0
        """Running requests whose prompt ends in this node, plus children with pins. Never evicted while above 0."""
        self.used = used
        """Tick of the last request that went through this node."""
        self.listed = False
        """It has an entry in the heap of what may be dropped next."""


class PrefixCache:
    """Page-granular prefix cache with least-recently-used eviction, as SGLang's radix cache.

    Eviction drops whole leaves, oldest first, which is what the recorded BlockRemoved events of SGLang 0.5.23 show.
    With `host_pages`, leaves dropped from the GPU stay in the host tier, which drops its own oldest leaves. The host
    holds a copy of all that the GPU caches, so it must be at least as large: else ValueError.
    """

    def __init__(self, capacity_pages: int, host_pages: int = 0) -> None:
        if 0 < host_pages < capacity_pages:
            raise ValueError(f"host_pages must be 0 or at least capacity_pages {capacity_pages}, got {host_pages}")
        self.capacity_pages = capacity_pages
        self.host_pages = host_pages
        self.allocated_pages = 0
        """Pages that requests own and that are not (yet) in the tree."""
        self.cached_pages = 0
        """Pages of the tree in GPU memory."""
        self.pinned_pages = 0
        """Of the cached pages, those no eviction may take."""
        self.tree_pages = 0
        """Pages of the tree in either tier."""
        self._root = Node((), None, 0)
        self._gpu_heap: list[tuple[int, int, Node]] = []
        """What the GPU may drop, by last use. An entry may be older than its node's last use, never younger."""
        self._host_heap: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._serial = 0

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.capacity_pages - self.allocated_pages - self.cached_pages

    @property
    def evictable_pages(self) -> int:
        """Cached pages that may be dropped to make room."""
        return self.cached_pages - self.pinned_pages

    def match(self, pages: Sequence[int], limit: int) -> tuple[Node, int]:
        """The deepest node in GPU memory on the way of `pages[:limit]`, and how many of them are. Counts as a use."""
        self._tick += 1
        return self._walk(self._root, 0, pages, limit, on_gpu=True)

    def match_host(self, node: Node, done: int, pages: Sequence[int], limit: int) -> tuple[Node, int]:
        """What the host tier has beyond what `match` found."""
        return self._walk(node, done, pages, limit, on_gpu=False)

    def resident(self, pages: Sequence[int], limit: int) -> int:
        """How many of `pages[:limit]` are in either tier. Not a use: changes nothing."""
        node, done = self._root, 0
        while done < limit:
            child = node.children.get(pages[done])
            if child is None:
                break
            common = _common(child.pages, pages, done, limit)
            done += common
            if common < len(child.pages):
                break
            node = child
        return done

    def pin(self, node: Node) -> None:
        """Keeps the node and all above it from eviction, until unpinned as often."""
        step: Node | None = node
        while step is not None:
            step.pins += 1
            if step.pins > 1:
                return
            self.pinned_pages += len(step.pages)
            step = step.parent

    def unpin(self, node: Node) -> None:
        """Undoes one `pin`."""
        step: Node | None = node
        while step is not None:
            step.pins -= 1
            if step.pins:
                return
            self.pinned_pages -= len(step.pages)
            self._list(step)
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

    def load_back(self, node: Node) -> None:
        """Copies the node, and what of its parents is only in the host tier, into pages taken with `allocate`."""
        step = node
        while not step.on_gpu:
            self._to_gpu(step)
            self.allocated_pages -= len(step.pages)
            assert step.parent is not None
            step = step.parent

    def insert(self, pages: Sequence[int], count: int, handed: int, node: Node | None = None, done: int = 0) -> Node:
        """Stores `pages[:count]`, the last `handed` of which the caller has allocated and now gives away.

        Those stored by another request in the meantime are freed. Returns the node of the last page. A caller that
        knows the node of `pages[:done]`, and has it pinned, spares the way to it.
        """
        self._tick += 1
        node, done = self._walk(node or self._root, done, pages, count, on_gpu=True)
        while done < count:
            below, reached = self._walk(node, done, pages, count, on_gpu=False)
            if reached == done:
                break
            self._to_gpu_below(node, below)
            node, done = self._walk(below, reached, pages, count, on_gpu=True)
        if done < count:
            self._serial += 1
            child = Node(list(pages[done:count]), node, self._serial, self._tick)
            node.children[pages[done]] = child
            node.on_gpu_children += 1
            self.cached_pages += count - done
            self.tree_pages += count - done
            node = child
        self.allocated_pages -= handed
        self._list(node)
        if self.host_pages and self.tree_pages > self.host_pages:
            self._evict_host(self.tree_pages - self.host_pages)
        return node

    def clear(self) -> None:
        """Drops everything that is not pinned."""
        self._evict(self.evictable_pages)
        self._evict_host(self.tree_pages - self.cached_pages)

    def _walk(self, node: Node, done: int, pages: Sequence[int], limit: int, *, on_gpu: bool) -> tuple[Node, int]:
        """Down from `node`, the end of `pages[:done]`, over nodes of one tier; cuts the last one where ways part."""
        tick = self._tick
        while done < limit:
            child = node.children.get(pages[done])
            if child is None or child.on_gpu is not on_gpu:
                break
            common = _common(child.pages, pages, done, limit)
            if common < len(child.pages):
                child = self._split(child, common)
            node = child
            node.used = tick
            done += common
        return node, done

    def _to_gpu_below(self, top: Node, node: Node) -> None:
        """Stores anew what only the host tier had, from below `top` down to `node`."""
        step = node
        while step is not top:
            self._to_gpu(step)
            assert step.parent is not None
            step = step.parent

    def _to_gpu(self, node: Node) -> None:
        node.on_gpu = True
        node.listed = False  # an entry in the host's heap is void now
        self.cached_pages += len(node.pages)
        assert node.parent is not None
        node.parent.on_gpu_children += 1
        self._list(node)

    def _list(self, node: Node) -> None:
        """Notes that a node may be dropped, if it may: it is a leaf of its tier, and not pinned."""
        if node.listed or node.pins or node.parent is None:
            return
        if node.on_gpu:
            if not node.on_gpu_children:
                node.listed = True
                heapq.heappush(self._gpu_heap, (node.used, node.serial, node))
        elif not node.children:
            node.listed = True
            heapq.heappush(self._host_heap, (node.used, node.serial, node))

    def _evict(self, count: int) -> None:
        while count > 0:
            leaf = self._oldest(self._gpu_heap, on_gpu=True)
            count -= len(leaf.pages)
            self.cached_pages -= len(leaf.pages)
            parent = leaf.parent
            assert parent is not None
            parent.on_gpu_children -= 1
            leaf.on_gpu = False
            if self.host_pages:
                self._list(leaf)
                self._list(parent)
            else:
                self._drop(leaf)

    def _evict_host(self, count: int) -> None:
        while count > 0:
            leaf = self._oldest(self._host_heap, on_gpu=False)
            count -= len(leaf.pages)
            self._drop(leaf)

    def _oldest(self, heap: list[tuple[int, int, Node]], *, on_gpu: bool) -> Node:
        """Takes the least recently used leaf of a tier. The caller has made sure that there is one."""
        while True:
            used, _, node = heapq.heappop(heap)
            if node.on_gpu is not on_gpu or node.parent is None:
                continue  # the entry is of the time when it was in the other tier, or in the tree
            node.listed = False
            if node.used != used:
                self._list(node)
            elif not node.pins and not (node.on_gpu_children if on_gpu else node.children):
                return node

    def _drop(self, leaf: Node) -> None:
        """Takes a leaf of the tree, in neither tier any more, out of it."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.pages[0]]
        leaf.parent = None
        self.tree_pages -= len(leaf.pages)
        self._list(parent)

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node in two after `at` pages and returns the upper part."""
        parent = node.parent
        assert parent is not None
        self._serial += 1
        upper = Node(node.pages[:at], parent, self._serial, node.used)
        upper.on_gpu = node.on_gpu
        upper.on_gpu_children = int(node.on_gpu)
        upper.pins = int(node.pins > 0)
        parent.children[upper.pages[0]] = upper
        node.pages = node.pages[at:]
        node.parent = upper
        upper.children[node.pages[0]] = node
        return upper


def _common(run: Sequence[int], pages: Sequence[int], offset: int, limit: int) -> int:
    """How many pages of `run` equal `pages[offset:limit]`; the first is known to."""
    high = min(len(run), limit - offset)
    if run[high - 1] == pages[offset + high - 1]:
        return high
    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == pages[offset + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
