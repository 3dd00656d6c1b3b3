"""Steps that hold decode rows and prefill segments at once, with padding, and their caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.checkpoint.tiny import random_model
from k3jax.distributed.mesh import make_mesh
from k3jax.distributed.sharding import on_mesh, state_specs
from k3jax.models.cache import (
    Batch,
    Checkpoints,
    DecodeRows,
    LatentCache,
    PrefillRows,
    allocate_cache,
    cache_specs,
)
from k3jax.models.mla import _append_decode
from pallas_kernels.common.segments import Segments
from tests.kernels.jaxprs import avals_made
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
    # Of the empty ones the first would write zeros, the second what it read.
    prefill = prefill_rows((0, 0, 5), (0, 33, 0), (1, 2, 3), TABLES, 3, 8)
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


def mixed_inputs(checkpoints=None):
    """Tokens and batch of two decode rows and a third sequence of 30 tokens, without padding."""
    prefill = prefill_rows((30,), (0,), (3,), TABLES[2:], 1, 30)
    prefill = dataclasses.replace(prefill, checkpoints=checkpoints)
    decode = decode_rows((20, 33), (True, True), (1, 2), TABLES[:2])
    tokens = np.random.default_rng(1).integers(0, 64, 32)
    return ints(*map(int, tokens)), Batch(decode, prefill)


def test_checkpoints_beside_decode_rows(started):
    """A snapshot is the memory after a prefill of that length; unused entries change slot 0."""
    checkpoints = Checkpoints(ints(0, 0, 0), ints(30, 0, 0), ints(4, 0, 0))
    hidden, with_them = step(*mixed_inputs(checkpoints), started)
    expected, without = step(*mixed_inputs(), started)
    np.testing.assert_array_equal(hidden, expected)
    np.testing.assert_array_equal(with_them.mla.pool, without.mla.pool)
    for a, b in zip(pools(with_them.kda), pools(without.kda), strict=True):
        np.testing.assert_array_equal(a[:, [1, 2, 3, 5]], b[:, [1, 2, 3, 5]])
        np.testing.assert_array_equal(a[:, 4], a[:, 3])
        assert np.any(a[:, 4] != b[:, 4])


def test_two_devices(started):
    tokens, batch = mixed_inputs()
    mesh = make_mesh(tp=2)
    graphdef, state = nnx.split(random_model(MICRO, mesh=mesh))
    plain, specs = jax.sharding.PartitionSpec(), cache_specs()

    def run(state, tokens, batch, cache):
        return nnx.merge(graphdef, state).step(tokens, batch, cache)

    sharded = on_mesh(mesh, run, (state_specs(state), plain, plain, specs), (plain, specs))
    split = jax.device_put(
        started, jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    )
    hidden, cache = jax.jit(sharded)(state, tokens, batch, split)
    expected, whole = step(tokens, batch, started)
    close(hidden, expected)
    for a, b in zip(pools(cache), pools(whole), strict=True):
        close(a, b)
    assert cache.mla.scale.sharding.is_fully_replicated
    assert cache.kda.state.addressable_shards[0].data.shape[2] == 2  # of 4 heads


# Caches.


def test_cache_dtypes():
    sizes = {"num_slots": 2, "num_pages": 2, "page_size": PAGE}
    cache = allocate_cache(MICRO, **sizes, dtype=jnp.bfloat16)
    assert cache.mla.pool.dtype == cache.kda.conv_q.dtype == jnp.bfloat16
    assert cache.kda.state.dtype == cache.mla.scale.dtype == jnp.float32
    assert cache.mla.scale.shape == (1,) and not cache.mla.is_scaled
    cache = allocate_cache(
        MICRO,
        **sizes,
        dtype=jnp.float32,
        mla_dtype=jnp.float8_e4m3fn,
        state_dtype=jnp.bfloat16,
    )
    assert (cache.mla.pool.dtype, cache.kda.state.dtype) == (jnp.float8_e4m3fn, jnp.bfloat16)
    assert cache.kda.conv_v.dtype == jnp.float32 and cache.mla.is_scaled
    assert jax.tree.structure(cache_specs()) == jax.tree.structure(cache)
    assert cache_specs().mla.scale == jax.sharding.PartitionSpec()


def append(values, scale, dtype):
    """A pool of one page with a row of each value, as one decode step writes it."""
    count = len(values)
    cache = LatentCache(jnp.zeros((1, count, 1, 1), dtype), jnp.asarray([scale], jnp.float32))
    table = jnp.arange(count, dtype=jnp.int32)[:, None]
    rows = DecodeRows(jnp.zeros(count, jnp.int32), jnp.ones(count, bool), table)
    row = jnp.asarray(values, jnp.float32)[:, None]
    run = jax.jit(lambda cache, row, rows: _append_decode(cache, row, rows, 0))
    return np.asarray(run(cache, row, rows).pool).reshape(-1).astype(np.float32)


def test_float8_rows_saturate_but_stay_broken_where_they_were():
    values = [1.0, -0.25, 1e6, -1e6, 224.0, 230.0, np.nan, np.inf, -np.inf]
    stored = append(values, 0.5, jnp.float8_e4m3fn)
    np.testing.assert_array_equal(stored[:6], [2, -0.5, 448, -448, 448, 448])
    assert np.isnan(stored[6:]).all()


def test_the_scale_is_of_float8_rows_only(started):
    np.testing.assert_array_equal(append([1e6, -3.0], 0.5, jnp.float32), [1e6, -3])
    other = dataclasses.replace(started, mla=LatentCache(started.mla.pool, jnp.full(1, np.nan)))
    (hidden, after), (expected, before) = (
        step(*mixed_inputs(), cache) for cache in (other, started)
    )
    np.testing.assert_array_equal(hidden, expected)
    np.testing.assert_array_equal(after.mla.pool, before.mla.pool)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_pools_beyond_32_bits_are_not_flattened(dtype):
    """F007: pools are indexed by layer, page and row, none of which is large. Nothing is run."""
    pages = 2**21  # of 16 rows of 28 values: 2^29.8 a layer, 2^31.8 as four layers have it
    cache = jax.eval_shape(
        lambda: allocate_cache(
            MICRO.replace(
                num_hidden_layers=5,
                linear_attn_config=dataclasses.replace(
                    MICRO.linear_attn_config, kda_layers=(1,), full_attn_layers=(2, 3, 4, 5)
                ),
            ),
            num_slots=SLOTS,
            num_pages=pages,
            page_size=PAGE,
            dtype=jnp.float32,
            mla_dtype=dtype,
        )
    )
    assert cache.mla.pool.size > 2**31
    graphdef, state = nnx.split(model())
    traced = _run.trace(graphdef, state, *mixed_inputs(), cache)
    shapes = {cache.mla.pool.shape}
    wide = [a for a in avals_made(traced.jaxpr) if a.size >= 2**31]
    assert wide and {a.shape for a in wide} == shapes
