"""Ragged batches: membership of tokens, and chunks that hold one sequence each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.common.segments import ChunkGrid, Segments

TOKENS, BATCH, SIZE = 40, 4, 8


@st.composite
def batches(draw):
    """starts, lens, skipped of disjoint runs in any order, empty ones among them."""
    cuts = sorted(draw(st.lists(st.integers(0, TOKENS), min_size=2 * BATCH, max_size=2 * BATCH)))
    runs = draw(st.permutations(list(zip(cuts[::2], cuts[1::2], strict=True))))
    starts, ends = np.asarray(runs, np.int32).T
    skipped = draw(st.lists(st.integers(0, 3 * SIZE), min_size=BATCH, max_size=BATCH))
    return starts, ends - starts, np.asarray(skipped, np.int32)


@functools.partial(jax.jit, static_argnames="has_skipped")
def regroup(x, starts, lens, skipped, has_skipped):
    segments = Segments(starts, lens)
    grid = ChunkGrid(segments, TOKENS, SIZE, skipped if has_skipped else None)
    chunks = grid.split(x)
    return {
        "ids": segments.ids(TOKENS),
        "offsets": segments.offsets(TOKENS),
        "chunks": chunks,
        "joined": grid.join(chunks),
        "valid": grid.valid,
        "sequence": grid.sequence,
        "first": grid.first,
        "last": grid.last,
        "begins": grid.begins,
    }


FULL = np.arange(BATCH, dtype=np.int32) * (TOKENS // BATCH)
TENS, SEVENS = np.full(BATCH, TOKENS // BATCH, np.int32), np.full(BATCH, SIZE - 1, np.int32)


@settings(max_examples=150, deadline=None)
@given(batch=batches())
@example(batch=(FULL, TENS, SEVENS))  # as many chunks as can be needed
@example(batch=(FULL, 0 * TENS, SEVENS))  # no token at all
def test_chunks_and_back(batch):
    starts, lens, skipped = batch
    x = np.stack([np.arange(TOKENS) + 1, -np.arange(TOKENS)], axis=1).astype(np.float32)
    for has_skipped in (False, True):
        got = jax.device_get(regroup(x, starts, lens, skipped, has_skipped))
        shift = skipped % SIZE if has_skipped else 0 * skipped

        ids = np.full(TOKENS, -1)
        for b in range(BATCH):
            ids[starts[b] : starts[b] + lens[b]] = b
        np.testing.assert_array_equal(got["ids"], ids)
        owned = ids >= 0
        offsets = np.arange(TOKENS) - starts[ids]
        np.testing.assert_array_equal(got["offsets"][owned], offsets[owned])

        np.testing.assert_array_equal(got["joined"], np.where(owned[:, None], x, 0))
        np.testing.assert_array_equal(got["chunks"][~got["valid"]], 0)
        assert got["valid"].sum() == owned.sum()

        chunk = 0
        for b in np.flatnonzero(lens):  # every sequence has chunks of its own, in order
            tokens = np.zeros((-(-(shift[b] + lens[b]) // SIZE), SIZE, 2))
            tokens.reshape(-1, 2)[shift[b] : shift[b] + lens[b]] = x[
                starts[b] : starts[b] + lens[b]
            ]
            own = slice(chunk, chunk + len(tokens))
            np.testing.assert_array_equal(got["chunks"][own], tokens)
            assert got["begins"][b] == chunk
            assert set(got["sequence"][own]) == {b}
            assert list(got["first"][own]) == [True] + [False] * (len(tokens) - 1)
            assert list(got["last"][own]) == [False] * (len(tokens) - 1) + [True]
            chunk += len(tokens)
        unused = slice(chunk, None)
        assert not (got["valid"][unused].any() or got["first"][unused].any())
        assert not got["last"][unused].any()


def test_poison_between_sequences_is_not_carried_along():
    x = np.full((TOKENS, 2), np.nan, np.float32)
    x[5:8] = 1
    starts, lens = np.asarray([5, 5, 8, 8], np.int32), np.asarray([3, 0, 0, 0], np.int32)
    got = regroup(x, starts, lens, lens, False)
    assert np.all(np.isfinite(got["chunks"]))
    assert np.sum(got["joined"]) == 6


def test_constructors():
    packed = Segments.from_cu_seqlens(jnp.asarray([0, 3, 3, 7], jnp.int32))
    np.testing.assert_array_equal(packed.starts, [0, 3, 3])
    np.testing.assert_array_equal(packed.lens, [3, 0, 4])
    np.testing.assert_array_equal(Segments.rectangle(2, 5).lens, [5, 5])
    padded = Segments.rectangle(2, 5, jnp.asarray([4, 1], jnp.int32))
    np.testing.assert_array_equal(padded.ids(12), [0] * 4 + [-1] + [1] + [-1] * 6)
