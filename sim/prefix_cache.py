"""The KV pool of one replica: pages in use by requests, and pages cached for reuse in a radix tree.

Pages are named by *chained* hashes: a page's name covers everything before it too. So two sequences that agree in
page i agree in all pages before i: a node is found by its first page alone, and its last page tells whether a sequence
goes on beyond it. What names are made of does not matter here.

With a host tier the same tree covers both: what the GPU drops stays in the tree as long as the host has a copy of it.
When the copy is made is the write policy's business (see `HostWrite`).
"""

from __future__ import annotations

import heapq
from enum import StrEnum
from typing import Final

SELECTIVE_HITS: Final = 2
"""Times that a node is stored anew before `write_through_selective` copies it: SGLang's write-through threshold
(mem_cache/hiradix_cache.py)."""


class HostWrite(StrEnum):
    """When a copy goes to the host tier: SGLang's `--hicache-write-policy`."""

    WRITE_THROUGH = "write_through"
    """When it is stored."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is stored for the second time. Every request stores its prompt twice, after prefill and at its end, so
    what this leaves out is the last answer of a session, and the prompts of requests that were cut short."""
    WRITE_BACK = "write_back"
    """When the GPU drops it."""


class Node:
    """A run of pages that were stored together, below the pages of its parents."""

    __slots__ = (
        "children",
        "end",
        "hits",
        "listed",
        "on_gpu",
        "on_gpu_children",
        "on_host",
        "pages",
        "parent",
        "pins",
        "serial",
        "used",
    )

    def __init__(self, pages: list[int], parent: Node | None, serial: int, used: int = 0) -> None:
        self.pages = pages
        self.parent = parent
        self.end: int = len(pages) + (parent.end if parent is not None else 0)
        """Pages from the beginning of the sequence to this node's last, which it includes."""
        self.serial = serial
        """Orders nodes of the same tick, so that runs can be repeated."""
        self.children = 0
        self.on_gpu = True
        """In GPU memory. If it is, so are its parents."""
        self.on_gpu_children = 0
        self.on_host = False
        """The host tier has a copy. What is not on the GPU is there."""
        self.hits = 0
        """Times it was stored, as far as the write policy counts."""
        self.pins = 0
        """Running requests whose prompt ends in this node, plus children with pins. Never evicted while above 0."""
        self.used = used
        """Tick of the last request that ended in this node. Those that went on below it need not be noted: a leaf goes
        when nothing is older, so that its parent, left behind, is older than all others either way."""
        self.listed = False
        """It has an entry in the heap of what may be dropped next."""


class PrefixCache:
    """Page-granular prefix cache with least-recently-used eviction, as SGLang's radix cache.

    Eviction drops whole leaves, oldest first, which is what the recorded BlockRemoved events of SGLang 0.5.23 show.
    With `host_pages`, leaves dropped from the GPU stay in the host tier, which drops its own oldest leaves. With
    `write_through` the host holds a copy of all that the GPU caches, so it must be at least as large: else ValueError.
    """

    def __init__(
        self, capacity_pages: int, host_pages: int = 0, host_write: HostWrite = HostWrite.WRITE_THROUGH
    ) -> None:
        if 0 < host_pages < capacity_pages and host_write is HostWrite.WRITE_THROUGH:
            raise ValueError(
                f"host_pages must be 0 or at least capacity_pages {capacity_pages}, got {host_pages} "
                "(or use another write policy)"
            )
        self.capacity_pages = capacity_pages
        self.host_pages = host_pages
        self.host_write = host_write
        self.allocated_pages = 0
        """Pages that requests own and that are not (yet) in the tree."""
        self.cached_pages = 0
        """Pages of the tree in GPU memory."""
        self.pinned_pages = 0
        """Of the cached pages, those no eviction may take."""
        self.copied_pages = 0
        """Pages of the tree that the host has."""
        self.tree_pages = 0
        """Pages of the tree in either tier."""
        self._root = Node([], None, 0)
        self._nodes: dict[int, Node] = {}
        """All but the root, by their first pages."""
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

    @property
    def available_pages(self) -> int:
        """Pages that `allocate` could give."""
        return self.capacity_pages - self.allocated_pages - self.pinned_pages

    def match(self, pages: list[int], limit: int) -> tuple[Node, int]:
        """The deepest node in GPU memory on the way of `pages[:limit]`, and how many of them are. Counts as a use."""
        self._tick += 1
        node = self._node(self._root, pages, limit)
        while not node.on_gpu:
            assert node.parent is not None
            node = node.parent
        node.used = self._tick
        return node, node.end

    def match_host(self, node: Node, pages: list[int], limit: int) -> tuple[Node, int]:
        """As `match` in either tier; `node` is what it found. Part of the same use."""
        node = self._node(node, pages, limit)
        node.used = self._tick
        return node, node.end

    def resident(self, pages: list[int], limit: int) -> int:
        """How many of `pages[:limit]` are in either tier. Not a use: changes nothing."""
        return self._way(self._root, pages, limit)[1]

    def pin(self, node: Node) -> None:
        """Keeps the node and all above it from eviction, until unpinned as often."""
        step: Node | None = node
        while step is not None:
            step.pins += 1
            if step.pins > 1:
                break
            step = step.parent
        self.pinned_pages += node.end - (step.end if step is not None else 0)

    def unpin(self, node: Node) -> None:
        """Undoes one `pin`."""
        step: Node | None = node
        while step is not None:
            step.pins -= 1
            if step.pins:
                break
            if not (step.on_gpu_children or step.listed):
                self._list(step)
            step = step.parent
        self.pinned_pages -= node.end - (step.end if step is not None else 0)

    def allocate(self, count: int) -> bool:
        """Takes pages for a request, evicting what must go; False and no change when there are not enough."""
        if count > self.available_pages:
            return False
        missing = count - self.free_pages
        if missing > 0:
            self._evict(missing)
        self.allocated_pages += count
        return True

    def release(self, count: int) -> None:
        """Gives back pages taken with `allocate`."""
        self.allocated_pages -= count

    def load_back(self, node: Node) -> None:
        """Copies the node, and what of its parents is only in the host tier, into pages taken with `allocate`."""
        while not node.on_gpu:
            self._to_gpu(node)
            self.allocated_pages -= len(node.pages)
            assert node.parent is not None
            node = node.parent

    def insert(
        self, pages: list[int], count: int, handed: int, node: Node | None = None, *, unfinished: bool = False
    ) -> Node:
        """Stores `pages[:count]`, the last `handed` of which the caller has allocated and now gives away.

        Those stored by another request in the meantime are freed. Returns the node of the last page. A caller that
        knows the node of its first pages, and has it pinned, spares the way to it. Counts as a use; but not for the
        write policy when the prompt is `unfinished`.
        """
        self._tick += 1
        node = node or self._root
        if node.end < count and pages[node.end] in self._nodes:
            node = step = self._node(node, pages, count)
            while not step.on_gpu:  # computed anew, though the host had it
                self._to_gpu(step)
                assert step.parent is not None
                step = step.parent
        if node.end < count:
            self._serial += 1
            child = Node(pages[node.end : count], node, self._serial)
            self._nodes[child.pages[0]] = child
            self.tree_pages += len(child.pages)
            node.children += 1
            node.on_gpu_children += 1
            self.cached_pages += len(child.pages)
            node = child
        node.used = self._tick
        self.allocated_pages -= handed
        if not node.on_gpu_children:
            self._list(node)
        if self.host_pages and not unfinished and self.host_write is not HostWrite.WRITE_BACK:
            self._write_through(node)
        return node

    def clear(self) -> None:
        """Drops everything that is not pinned."""
        self._evict(self.evictable_pages)
        self._evict_host(self.tree_pages - self.cached_pages)

    def _node(self, node: Node, pages: list[int], limit: int) -> Node:
        """The last node on the way of `pages[:limit]` from a node of theirs on, cut so that it ends where they part."""
        last, end = self._way(node, pages, limit)
        return last if last.end == end else self._split(last, end)

    def _way(self, node: Node, pages: list[int], limit: int) -> tuple[Node, int]:
        """The same uncut, and how many of the pages it and those above it hold."""
        nodes = self._nodes
        end = node.end
        while end < limit:
            below = nodes.get(pages[end])
            if below is None:
                break
            node = below
            start, end = end, node.end
            if end > limit or pages[end - 1] != node.pages[-1]:
                return node, start + _common(node.pages, pages[start : min(end, limit)])
        return node, end

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

    def _write_through(self, node: Node) -> None:
        """Counts a storing on the whole way, and copies what has been stored often enough, from the top."""
        way = []
        step = node
        while step.parent is not None and not step.on_host:
            way.append(step)
            step = step.parent
        needed = SELECTIVE_HITS if self.host_write is HostWrite.WRITE_THROUGH_SELECTIVE else 1
        for step in way:
            step.hits += 1
        for step in reversed(way):
            if step.hits < needed or not self._copy(step):
                return

    def _copy(self, node: Node) -> bool:
        """Copies a node to the host; False when even without all it might drop it has no room."""
        if not self._evict_host(self.copied_pages + len(node.pages) - self.host_pages):
            return False
        node.on_host = True
        self.copied_pages += len(node.pages)
        return True

    def _evict(self, count: int) -> None:
        """The caller has made sure that so much may go."""
        while count > 0:
            leaf = self._oldest(self._gpu_heap, on_gpu=True)
            assert leaf is not None
            count -= len(leaf.pages)
            self.cached_pages -= len(leaf.pages)
            parent = leaf.parent
            assert parent is not None
            parent.on_gpu_children -= 1
            if not leaf.on_host and self.host_pages and self.host_write is HostWrite.WRITE_BACK:
                self._copy(leaf)
                leaf.listed = False  # it may have been, as the last of its children went from the host
            leaf.on_gpu = False
            if leaf.on_host:
                self._list(leaf)
                self._list(parent)
            else:
                self._drop(leaf)

    def _evict_host(self, count: int) -> bool:
        """Whether so many pages of the host could be freed."""
        while count > 0:
            leaf = self._oldest(self._host_heap, on_gpu=False)
            if leaf is None:
                return False
            count -= len(leaf.pages)
            self._drop(leaf)
        return True

    def _oldest(self, heap: list[tuple[int, int, Node]], *, on_gpu: bool) -> Node | None:
        """Takes the least recently used leaf of a tier."""
        while heap:
            used, _, node = heapq.heappop(heap)
            if node.on_gpu is not on_gpu or node.parent is None:
                continue  # the entry is of the time when it was in the other tier, or in the tree
            node.listed = False
            if node.used != used:
                self._list(node)
            elif not node.pins and not (node.on_gpu_children if on_gpu else node.children):
                return node
        return None

    def _drop(self, leaf: Node) -> None:
        """Takes a leaf of the tree, in neither tier any more, out of it."""
        parent = leaf.parent
        assert parent is not None
        parent.children -= 1
        leaf.parent = None
        if leaf.on_host:
            self.copied_pages -= len(leaf.pages)
        del self._nodes[leaf.pages[0]]
        self.tree_pages -= len(leaf.pages)
        self._list(parent)

    def _split(self, node: Node, end: int) -> Node:
        """Cuts a node in two at `end` pages of the sequence and returns the upper part."""
        parent = node.parent
        assert parent is not None
        at = end - parent.end
        self._serial += 1
        upper = Node(node.pages[:at], parent, self._serial, node.used)
        upper.children = 1
        upper.on_gpu = node.on_gpu
        upper.on_gpu_children = int(node.on_gpu)
        upper.on_host = node.on_host
        upper.hits = node.hits
        upper.pins = int(node.pins > 0)
        node.pages = node.pages[at:]
        node.parent = upper
        self._nodes[upper.pages[0]], self._nodes[node.pages[0]] = upper, node
        return upper


def _common(one: list[int], other: list[int]) -> int:
    """How many leading pages two sequences have in common; as names are chained, equal once is equal before."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
