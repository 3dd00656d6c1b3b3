"""The tree of published prefixes: which pages and which states stand for which hash.

A node is one match unit; it stands for the whole prefix up to its end. The tree is closed: a node
is in the index only with all its ancestors (C-15), so that pages behind a lost one, and the states
that need them, go at the same moment.
"""

import bisect
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3jax.cache.events import CacheEvent, EventLog
from k3jax.cache.hashing import HashChain, Root
from k3jax.cache.pages import Pool
from k3jax.cache.settings import CacheSettings

GHOSTS = 4096  # hashes of removed items that are remembered, to explain misses


@dataclass(eq=False, slots=True)
class Node:
    """One published unit: tokens (num_tokens - match_unit, num_tokens] behind its parent.

    pages: the unit's pages, where a unit has one or more; where units are smaller than pages, the
    one page that holds everything from the page's start to the end of this unit.
    covered: a state is kept here or deeper, so that the pages up to here serve a purpose.
    """

    hash: bytes
    parent: "Node | None"
    num_tokens: int
    pages: tuple[int, ...] = ()
    slot: int | None = None
    priority: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)
    covered: bool = False
    covered_children: int = 0
    alive: bool = True
    poisoned: bool = False  # removed because its numbers may not be finite
    root: Root | None = None  # of the node above the first unit


class Index:
    """Nodes by hash, and the eviction of their pages and states with everything behind them."""

    def __init__(
        self,
        settings: CacheSettings,
        pages: Pool,
        slots: Pool,
        events: EventLog,
        evictions: Counter[tuple[str, str]],
    ):
        self.settings = settings
        self.pages = pages
        self.slots = slots
        self.events = events
        self.nodes: dict[bytes, Node] = {}
        self.roots: dict[bytes, Node] = {}
        self.evictions = evictions
        # From the shallowest to the deepest. Siblings share a page after a fork inside a unit.
        self._on_page: dict[int, list[Node]] = {}
        self._on_slot: dict[int, Node] = {}
        self._ghosts: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    # Reading.

    def at(self, chain: HashChain, num_tokens: int) -> Node | None:
        """The node of the chain's first `num_tokens` tokens, a multiple of the match unit."""
        return self.nodes.get(chain.hashes[num_tokens // self.settings.match_unit - 1])

    def deepest(self, chain: HashChain, limit: int) -> Node | None:
        """The node of the longest published prefix of at most `limit` tokens.

        Published prefixes are closed, so that bisection finds the end of the run.
        """
        hashes = chain.hashes
        low, high = 0, min(max(limit, 0) // self.settings.match_unit, len(hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self.nodes:
                low = middle
            else:
                high = middle - 1
        return self.nodes[hashes[low - 1]] if low else None

    def deepest_state(self, node: Node | None) -> tuple[Node | None, str]:
        """The nearest node from `node` upwards with a state; why no deeper one has, if known."""
        cause = ""
        while node is not None and node.slot is None:
            cause = cause or self.cause("kda", node.hash)
            node = node.parent
        return node, cause

    def path_pages(self, node: Node) -> list[int]:
        """The pages of tokens [0, node.num_tokens), in order; the last may be filled in part."""
        size, found = self.settings.page_size, []
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at is node or at.num_tokens % size == 0:
                found.append(at.pages)
            at = at.parent
        return [page for group in reversed(found) for page in group]

    def required(self, node: Node) -> tuple[list[int], int | None]:
        """What must be resident to resume at this node: all pages, and the state (C-19)."""
        return self.path_pages(node), node.slot

    def cause(self, group: str, hash: bytes) -> str:
        """Why the item with this hash was removed, if it was and that is still remembered."""
        return self._ghosts.get((group, hash), "")

    def on_page(self, page: int) -> Sequence[Node]:
        return self._on_page.get(page, ())

    # Publishing.

    def add(
        self,
        chain: HashChain,
        unit: int,
        parent: Node | None,
        pages: tuple[int, ...],
        priority: int,
    ) -> Node:
        """Publishes unit `unit` of the chain, whose pages hold final tokens; or finds it there.

        What is there already keeps its pages: equal hashes stand for equal tokens.
        """
        node = self.nodes.get(chain.hashes[unit])
        if node is not None:
            self.raise_priority(node, priority)
            return node
        if 0 in pages:
            raise RuntimeError("the reserved page is never published")
        if parent is None:
            parent = self._root(chain.root)
        node = Node(
            hash=chain.hashes[unit],
            parent=parent,
            num_tokens=parent.num_tokens + self.settings.match_unit,
            pages=pages,
            priority=priority,
        )
        parent.children[node.hash] = node
        self.nodes[node.hash] = node
        self._ghosts.pop(("mla", node.hash), None)
        for page in pages:
            self._enter_page(node, page)
        if self.events.enabled:
            start = node.num_tokens - self.settings.match_unit
            tokens = tuple(chain.tokens[start : node.num_tokens])
            self._record("stored", "mla", node, pages, token_ids=tokens, adapter=chain.root.adapter)
        return node

    def add_state(self, node: Node, slot: int) -> bool:
        """Publishes a state at `node`; False if there is one, which then stays (C-3)."""
        if node.slot is not None:
            return False
        if slot == 0:
            raise RuntimeError("the reserved slot is never published")
        node.slot = slot
        self._on_slot[slot] = node
        self._ghosts.pop(("kda", node.hash), None)
        self.slots.publish(slot, (node.priority, True))
        self._cover(node)
        if self.events.enabled:
            self._record("stored", "kda", node, (slot,))
        return True

    def raise_priority(self, node: Node, priority: int) -> None:
        """Gives a node, its pages and its state at least this priority."""
        if priority <= node.priority:
            return
        node.priority = priority
        for page in node.pages:
            self._rerank(page)
        if node.slot is not None:
            self.slots.publish(node.slot, (priority, True))

    def touch(self, node: Node | None) -> None:
        """Marks the whole path as used just now, so that no page outlives one that it needs."""
        while node is not None:
            for page in reversed(node.pages):
                self.pages.touch(page)
            node = node.parent

    # Removing.

    def evict_page(self) -> bool:
        """Takes the least valuable idle page out of the index; False if there is none."""
        page = self.pages.oldest()
        if page is None:
            return False
        for node in reversed(self._on_page[page][:]):
            # Where units are smaller than pages, another branch may hold the same units in its own
            # page: then the prefix stays known, and only this branch goes.
            inside = node.num_tokens % self.settings.page_size != 0
            heir = next(iter(node.children.values()), None) if inside else None
            if heir is not None:
                self._move(node, page, heir.pages)
            else:
                self.drop(node, "evicted")
        return True

    def evict_slot(self, *, priority: int | None = None) -> bool:
        """Takes the least valuable idle state out of the index; False if there is none, or none of
        at most this priority."""
        slot = self.slots.oldest()
        if slot is None:
            return False
        node = self._on_slot[slot]
        if priority is not None and node.priority > priority:
            return False
        self.drop_state(node, "evicted")
        return True

    def drop(self, node: Node, cause: str, *, quarantine: bool = False) -> None:
        """Removes a node and everything behind it. What is held stays with its holders."""
        if not node.alive:
            return
        top = node.parent
        for gone in reversed(list(self._subtree(node))):
            if gone.slot is not None:
                if quarantine:
                    self.slots.quarantine(gone.slot)
                self._remove_state(gone, cause if gone is node else f"{cause} with its pages")
            gone.alive, gone.poisoned = False, quarantine
            if gone.parent is None:
                del self.roots[gone.hash]
                continue
            for page in gone.pages:
                if quarantine:
                    self.pages.quarantine(page)
                self._leave_page(gone, page)
            del self.nodes[gone.hash]
            self._remember("mla", gone, gone.pages, cause)
        if top is None:
            return
        del top.children[node.hash]
        if node.covered:
            top.covered_children -= 1
            self._uncover(top)
        if top.parent is None and not top.children:
            top.alive = False
            del self.roots[top.hash]

    def drop_state(self, node: Node, cause: str) -> None:
        """Removes the state at a node; its pages stay."""
        self._remove_state(node, cause)
        self._uncover(node)

    # Details.

    def _root(self, root: Root) -> Node:
        node = self.roots.get(root.digest)
        if node is None:
            node = self.roots[root.digest] = Node(root.digest, None, 0, root=root)
        return node

    def _subtree(self, node: Node) -> Iterator[Node]:
        """Parents before children."""
        waiting = [node]
        while waiting:
            at = waiting.pop()
            yield at
            waiting.extend(at.children.values())

    def _remove_state(self, node: Node, cause: str) -> None:
        assert node.slot is not None
        slot, node.slot = node.slot, None
        del self._on_slot[slot]
        self.slots.unpublish(slot)
        self._remember("kda", node, (slot,), cause)

    def _enter_page(self, node: Node, page: int) -> None:
        there = self._on_page.setdefault(page, [])
        bisect.insort(there, node, key=operator.attrgetter("num_tokens"))
        self._rerank(page)

    def _leave_page(self, node: Node, page: int) -> None:
        there = self._on_page[page]
        there.remove(node)
        if there:
            self._rerank(page)
        else:
            del self._on_page[page]
            self.pages.unpublish(page)

    def _move(self, node: Node, page: int, target: tuple[int, ...]) -> None:
        """Lets a node inside a page point to another page that holds the same tokens."""
        node.pages = target
        self._enter_page(node, target[0])
        self._leave_page(node, page)

    def _rerank(self, page: int) -> None:
        there = self._on_page[page]
        priority = max(node.priority for node in there)
        self.pages.publish(page, (priority, any(node.covered for node in there)))

    def _cover(self, node: Node | None) -> None:
        """Marks the path to a new state; stops where it is marked: O(1) a unit."""
        while node is not None and not node.covered:
            node.covered = True
            for page in node.pages:
                self._rerank(page)
            node = node.parent
            if node is not None:
                node.covered_children += 1

    def _uncover(self, node: Node | None) -> None:
        while node is not None and node.covered and node.slot is None and not node.covered_children:
            node.covered = False
            for page in node.pages:
                self._rerank(page)
            node = node.parent
            if node is not None:
                node.covered_children -= 1

    def _remember(self, group: str, node: Node, items: tuple[int, ...], cause: str) -> None:
        self.evictions[group, cause] += 1
        self._ghosts[group, node.hash] = cause
        self._ghosts.move_to_end((group, node.hash))
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        if self.events.enabled:
            self._record("removed", group, node, items, cause=cause)

    def _record(
        self, action: str, group: str, node: Node, items: tuple[int, ...], **more: Any
    ) -> None:
        self.events.record(
            CacheEvent(
                action=action,
                group=group,
                hash=node.hash,
                parent=node.parent.hash if node.parent and node.parent.parent else None,
                num_tokens=node.num_tokens,
                items=items,
                **more,
            )
        )
