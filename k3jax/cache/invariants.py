"""Checks of a whole cache manager, for tests and for looking into a live one."""

from collections import Counter

from k3jax.cache.index import Index
from k3jax.cache.manager import CacheManager
from k3jax.cache.pages import Pool
from k3jax.cache.sequence import Fence


def check_invariants(manager: CacheManager) -> None:
    """Raises `AssertionError` with the number of the invariant that does not hold."""
    held_pages, held_slots = _holders(manager)
    _check_pool(manager.pages, held_pages)
    _check_pool(manager.slots, held_slots)
    _check_index(manager.index)
    settings = manager.settings
    for sequence in manager.live_sequences():
        pages = sequence.pages
        assert len(pages) >= settings.pages_for(sequence.num_scheduled), "C-6: page missing"
        assert 0 not in pages and sequence.slot != 0, "S-9: a reserved item was handed out"
        assert len(set(pages)) == len(pages), "C-6: a page stands twice in a table"
        assert sequence.num_computed <= sequence.num_scheduled, "S-2"
    for step in manager.steps():
        targets = [copy.target for row in step.rows.values() for copy in row.slot_copies]
        targets += [export.slot for row in step.rows.values() for export in row.exports]
        assert len(set(targets)) == len(targets), "C-3: two writers of one slot in a step"


def _holders(manager: CacheManager) -> tuple[Counter[int], Counter[int]]:
    """References to pages and slots, counted from all that may hold one."""
    pages: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    snapshots = set()
    for sequence in manager.live_sequences():
        pages.update(sequence.pages)
        slots[sequence.slot] += 1
        if sequence.tail is not None:
            snapshots.add(sequence.tail)
    for step in manager.steps():
        for row in step.rows.values():
            snapshots.update(row.snapshots)
            for pool, item in row.held:
                (pages if pool is manager.pages else slots)[item] += 1
    gone = (Fence.DROPPED, Fence.PUBLISHED)
    slots.update(snapshot.slot for snapshot in snapshots if snapshot.fence not in gone)
    for pinned, slot in manager.pins.holds():
        pages.update(pinned)
        slots[slot] += 1
    return pages, slots


def _check_pool(pool: Pool, held: Counter[int]) -> None:
    free, idle = pool.free_items(), pool.idle_items()
    for item in range(1, pool.size):
        assert pool.references(item) == held[item], f"C-6: references of item {item}"
        places = (item in free) + (item in idle) + (held[item] > 0)
        assert places == 1, f"C-6: item {item} is in {places} places"
    assert 0 not in free and 0 not in idle and not held[0], "S-9: the reserved item"
    counts = pool.counts()
    assert counts.total == pool.size and counts.free == len(free) and counts.idle == len(idle)


def _check_index(index: Index) -> None:
    settings = index.settings
    on_page: Counter[int] = Counter()
    for node in index.nodes.values():
        assert node.alive and node.parent is not None
        assert node.parent.alive and node.parent.children[node.hash] is node, "C-15: closure"
        assert node.num_tokens == node.parent.num_tokens + settings.match_unit
        assert len(node.pages) == max(1, settings.match_unit // settings.page_size)
        for page in node.pages:
            on_page[page] += 1
            assert node in index.on_page(page)
            assert index.pages.references(page) or index.pages.is_idle(page), "C-15: page is gone"
        covered = node.slot is not None or any(c.covered for c in node.children.values())
        assert node.covered == covered
        assert node.covered_children == sum(c.covered for c in node.children.values())
        if node.slot is not None:
            assert index.slots.references(node.slot) or index.slots.is_idle(node.slot)
            pages, slot = index.required(node)
            assert slot is not None and len(pages) == settings.pages_for(node.num_tokens), "C-19"
            assert all(index.on_page(page) for page in pages), "C-19: a page is not resident"
    for page, count in on_page.items():
        there = index.on_page(page)
        assert len(there) == count
        assert sorted(there, key=lambda node: node.num_tokens) == list(there)
    slots = [node.slot for node in index.nodes.values() if node.slot is not None]
    assert len(set(slots)) == len(slots), "C-6: one slot for two prefixes"
    assert all(root.children for root in index.roots.values()), "an empty root is kept"
