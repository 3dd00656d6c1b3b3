"""Steps that hold decode rows and prefill segments at once, with padding, and their caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.checkpoint.tiny import random_model
from k3jax.models.cache import Batch, DecodeRows, PrefillRows, allocate_cache
from pallas_kernels.common.segments import Segments
from tests.micro import MICRO

SLOTS, PAGES, PAGE = 6, 12, 16


@functools.cache
def model():
    return random_model(MICRO)


def step(tokens, batch, cache):
    return _run(*nnx.split(model()), tokens, batch, cache)


@functools.partial(jax.jit, static_argnums=0)
def _run(graphdef, state, tokens, batch, cache):
    return nnx.merge(graphdef, state).step(tokens, batch, cache)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def prefill_rows(lens, context, slots, tables, count, width):
    """Segments one behind the other, padded to `count` sequences and `width` tokens."""
    spare = count - len(lens)
    starts = np.concatenate([np.cumsum([0, *lens[:-1]]), np.zeros(spare)]).astype(np.int32)

    def padded(values):
        return ints(*values, *[0] * spare)

    table = np.zeros((count, 4), np.int32)
    table[: len(lens)] = tables
    return PrefillRows(
        Segments(jnp.asarray(starts), padded(lens)),
        padded(context),
        padded(slots),
        jnp.asarray(table),
    )


def decode_rows(context, active, slots, tables):
    return DecodeRows(ints(*context), jnp.asarray(active), jnp.asarray(tables), ints(*slots))


TABLES = np.asarray([[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 10, 0]], np.int32)
NO_PAGES = np.zeros(4, np.int32)


@pytest.fixture(scope="module")
def started():
    """A cache in which two sequences have 20 and 33 tokens."""
    cache = allocate_cache(
        MICRO, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, dtype=jnp.float32
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, 60), jnp.int32)
    rows = prefill_rows((20, 33), (0, 0), (1, 2), TABLES[:2], 2, 60)
    _, cache = step(tokens, Batch(prefill=rows), cache)
    return cache


def pools(cache):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]


def close(a, b):
    # Matrix products over other numbers of rows round differently; the values are near 1.
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def mixed(started, *, decodes=2, count=1, width=30, tail=7):
    """Two rows decode while a third sequence of 30 tokens begins, with padding of both kinds."""
    spare = decodes - 2
    decode = decode_rows(
        (20, 33, *[0] * spare),
        (True, True, *[False] * spare),
        (1, 2, *[0] * spare),
        np.stack([TABLES[0], TABLES[1], *[NO_PAGES] * spare]),
    )
    prefill = prefill_rows((30,), (0,), (3,), TABLES[2:], count, width)
    new = np.random.default_rng(1).integers(0, 64, 32)
    tokens = [*new[:2], *[tail] * spare, *new[2:], *[tail] * (width - 30)]
    hidden, cache = step(ints(*map(int, tokens)), Batch(decode, prefill), started)
    return np.concatenate([hidden[:2], hidden[decodes : decodes + 30]]), pools(cache)


def test_both_parts_are_as_in_steps_of_their_own(started):
    hidden, together = mixed(started)
    new = np.random.default_rng(1).integers(0, 64, 32)
    decode = decode_rows((20, 33), (True, True), (1, 2), TABLES[:2])
    first, cache = step(ints(*map(int, new[:2])), Batch(decode), started)
    prefill = prefill_rows((30,), (0,), (3,), TABLES[2:], 1, 30)
    second, cache = step(ints(*map(int, new[2:])), Batch(prefill=prefill), cache)
    close(hidden, np.concatenate([first, second]))
    for a, b in zip(together, pools(cache), strict=True):
        close(a, b)


def test_padding_changes_nothing(started):
    """S-8: bit for bit, whatever the padding holds, but for the items reserved for it."""
    sizes = {"decodes": 4, "count": 3, "width": 40}
    hidden, cache = mixed(started, **sizes)
    for tail in (0, 63):
        again, other = mixed(started, **sizes, tail=tail)
        np.testing.assert_array_equal(again, hidden)
        for a, b in zip(other, cache, strict=True):
            if a.ndim > 1:
                np.testing.assert_array_equal(a[:, 1:], b[:, 1:])
    smaller, exact = mixed(started)
    close(hidden, smaller)
    for a, b, before in zip(cache, exact, pools(started), strict=True):
        if a.ndim == 1:
            continue
        close(a[:, 1:], b[:, 1:])
        untouched = [4, 5] if a.shape[1] == SLOTS else [11]
        np.testing.assert_array_equal(a[:, untouched], before[:, untouched])


def test_rows_that_rest_change_nothing(started):
    """Inactive decode rows and empty segments, although they name slots and pages of others."""
    decode = decode_rows((20, 33), (False, False), (1, 2), TABLES[:2])
    prefill = prefill_rows((0, 5), (20, 0), (1, 3), TABLES[[0, 2]], 2, 8)
    _, cache = step(ints(*range(10)), Batch(decode, prefill), started)
    for after, before in zip(pools(cache), pools(started), strict=True):
        if after.ndim > 1:
            same = [1, 2, 4, 5] if after.shape[1] == SLOTS else list(range(1, 8))
            np.testing.assert_array_equal(after[:, same], before[:, same])


def test_aligned_context_gives_the_same():
    """Without a phase, chunks of a context of a multiple of 64 lie where they lay."""
    tokens = ints(*map(int, np.random.default_rng(2).integers(0, 64, 128)))
    cache = allocate_cache(
        MICRO, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, dtype=jnp.float32
    )
    table = jnp.arange(1, 9, dtype=jnp.int32)[None]
    found = []
    for aligned in (False, True):
        now = cache
        for start in (0, 64):
            rows = PrefillRows(
                Segments(ints(0), ints(64)), ints(start), ints(1), table, aligned=aligned
            )
            hidden, now = step(tokens[start : start + 64], Batch(prefill=rows), now)
        found.append((np.asarray(hidden), *pools(now)))
    for a, b in zip(*found, strict=True):
        close(a, b)


@pytest.mark.parametrize(
    "dtypes, limit",
    [
        ({"mla_dtype": jnp.float8_e4m3fn}, 0.1),  # rows of 4 significant bits
        ({"state_dtype": jnp.bfloat16}, 0.03),  # a state of 8 significant bits
    ],
    ids=["fp8_rows", "bf16_state"],
)
def test_narrow_caches(started, dtypes, limit):
    cache = allocate_cache(
        MICRO, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, dtype=jnp.float32, **dtypes
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, 60), jnp.int32)
    rows = prefill_rows((20, 33), (0, 0), (1, 2), TABLES[:2], 2, 60)
    _, cache = step(tokens, Batch(prefill=rows), cache)
    exact, _ = mixed(started)
    narrow, after = mixed(cache)
    assert all(np.isfinite(pool.astype(np.float32)).all() for pool in after)
    error = np.sqrt(np.mean((narrow - exact) ** 2) / np.mean(exact**2))
    assert 0 < error < limit
