"""One pool: who holds an item, and which goes first."""

import pytest

from k3jax.cache.pages import Pool


def stored(pool: Pool, rank=(0, True)) -> int:
    item = pool.take()
    pool.publish(item, rank)
    pool.release(item)
    return item


def test_the_reserved_item_is_never_handed_out():
    """S-9, F020."""
    pool = Pool(5)
    items = {pool.take() for _ in range(4)}
    assert items == {1, 2, 3, 4} and pool.available == 0
    with pytest.raises(IndexError):
        pool.take()


def test_every_item_is_in_one_place():
    """C-6."""
    pool = Pool(5)
    held, _ = pool.take(), stored(pool)
    counts = pool.counts()
    assert (counts.free, counts.referenced, counts.idle, counts.reserved) == (2, 1, 1, 1)
    assert counts.total == 5 and pool.available == 3
    pool.release(held)
    assert pool.counts().free == 3


def test_nothing_is_released_twice():
    """S-3."""
    pool = Pool(3)
    item = pool.take()
    pool.release(item)
    with pytest.raises(RuntimeError):
        pool.release(item)
    with pytest.raises(RuntimeError):
        pool.retain(item)


def test_least_recently_used_goes_first():
    pool = Pool(6)
    a, b, c = stored(pool), stored(pool), stored(pool)
    pool.retain(a)
    assert pool.oldest() == b  # what is held is not evicted (C-7)
    pool.release(a)
    pool.touch(b)
    assert pool.oldest() == c
    pool.unpublish(c)
    assert pool.oldest() == a and pool.num_free == 3


def test_rank_comes_before_age():
    pool = Pool(6)
    important, covered, bare = (stored(pool, r) for r in [(1, False), (0, True), (0, False)])
    assert pool.oldest() == bare
    pool.publish(bare, (2, True))
    assert pool.oldest() == covered
    pool.unpublish(covered)
    assert pool.oldest() == important


def test_quarantined_items_are_zeroed_when_nobody_holds_them():
    """C-13, C-7."""
    pool = Pool(3)
    item = pool.take()
    pool.retain(item)
    pool.quarantine(item)
    pool.release(item)
    assert pool.take_to_zero() == []
    pool.release(item)
    assert pool.take_to_zero() == [item] and pool.take_to_zero() == []
    assert not pool.is_quarantined(item)
