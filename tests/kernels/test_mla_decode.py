"""Absorbed latent attention over pages against a float64 loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mla_decode
from tests.kernels import oracle
from tests.kernels.oracle import assert_close, on_host

HEADS, WIDTH, VALUE, SCALE, LIMIT = 2, 12, 8, 0.4, 1e-5
TABLE_TOKENS = 1280  # more than two steps of 512 tokens

call = on_host(jax.jit(mla_decode, static_argnames=("scale", "value_dim", "implementation")))
decode = functools.partial(call, scale=SCALE, value_dim=VALUE)

LENGTHS = {
    "page_edge": [63, 64, 65, 0],
    "step_edge": [511, 512, 513, 1],
    "several_steps": [1280, 1024, 1025, 700],
    "padding_only": [0, 0, 0, 0],
}


def paged(lengths, page_size, max_tokens=TABLE_TOKENS, width=WIDTH, heads=HEADS):
    """Scattered pages: whatever no sequence holds is NaN, ids that must not be read are no ids."""
    rng = np.random.default_rng(sum(lengths) + page_size)
    max_pages = -(-max_tokens // page_size)
    used = [-(-n // page_size) for n in lengths]
    pages = rng.permutation(sum(used) + 3).astype(np.int32)
    pool = np.full((2, len(pages), page_size, width), np.nan, np.float32)
    table = np.full((len(lengths), max_pages), 2**30, np.int32)
    rows = []
    for b, length in enumerate(lengths):
        rows.append(rng.standard_normal((length, width)).astype(np.float32))
        own, pages = pages[: used[b]], pages[used[b] :]
        table[b, : used[b]] = own
        for t in range(length):
            pool[1, own[t // page_size], t % page_size] = rows[b][t]
    q = rng.standard_normal((len(lengths), heads, width)).astype(np.float32)
    return [q, pool, np.int32(1), table, np.asarray(lengths, np.int32)], rows


def by_hand(q, rows, value_dim=VALUE):
    def one(q, rows):
        keys = np.broadcast_to(rows[:, None], (len(rows), *q.shape))
        return oracle.attention(q, keys, keys[..., :value_dim], SCALE)

    return np.stack([one(x, r) for x, r in zip(q, rows, strict=True)])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths(lengths, implementation):
    arguments, rows = paged(lengths, 64)
    out = decode(*arguments, implementation=implementation)
    assert_close(out, by_hand(arguments[0], rows), LIMIT)
    for b, length in enumerate(lengths):
        if not length:
            np.testing.assert_array_equal(out[b], 0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_sizes(page_size, implementation):
    for lengths in ([15, 16, 17, 0], [700, 1, 512, 513]):
        arguments, rows = paged(lengths, page_size)
        out = decode(*arguments, implementation=implementation)
        assert_close(out, by_hand(arguments[0], rows), LIMIT)


def test_one_step_needs_no_loop():
    """A table of at most 512 tokens takes the short way."""
    arguments, rows = paged([5, 0, 100], 16, max_tokens=112)
    assert_close(decode(*arguments), by_hand(arguments[0], rows), LIMIT)


def test_a_row_does_not_depend_on_its_batch():
    arguments, _ = paged([65, 3, 700, 0], 64)
    q, pool, layer, table, lens = arguments
    out = decode(*arguments)
    order = np.asarray([2, 0, 3, 1])
    shuffled = decode(q[order], pool, layer, table[order], lens[order])
    np.testing.assert_array_equal(shuffled, out[order])


def test_a_poisoned_sequence_stays_alone():
    arguments, _ = paged([65, 3, 700, 0], 64)
    q, pool, layer, table, lens = arguments
    clean = decode(*arguments)
    pool[1, table[0, 1], 0] = np.nan
    out = decode(q, pool, layer, table, lens)
    np.testing.assert_array_equal(out[1:], clean[1:])
    assert np.all(np.isnan(out[0]))


@pytest.mark.parametrize("lengths", [[32766, 32767, 32768, 32769, 32770], [65535, 65536]], ids=str)
def test_positions_beyond_sixteen_bits(lengths):
    """One head of 8 channels, where a narrow index would wrap around."""
    lengths = [*lengths, *[0] * (5 - len(lengths))]
    arguments, rows = paged(lengths, 16, max_tokens=65536, width=8, heads=1)
    # All keys count about the same, so that each wrong one shows.
    q, *rest = arguments
    q *= np.float32(0.1)
    out = decode(q, *rest)
    assert_close(out, by_hand(q, rows), LIMIT)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_float8_rows(implementation):
    """As the reference over rows widened beforehand, in several steps; what is unused is NaN."""
    (q, pool, *rest), _ = paged([1280, 0, 65, 513], 64)
    scale = np.float32(0.1)
    narrow = jnp.asarray(pool / scale).astype(jnp.float8_e4m3fn)
    wide = narrow.astype(jnp.float32) * scale
    out = decode(q, narrow, *rest, pool_scale=jnp.asarray(scale), implementation=implementation)
    assert_close(out, decode(q, wide, *rest, implementation="reference"), LIMIT)


def test_bfloat16_in_and_out():
    arguments, rows = paged([65, 3, 700, 0], 64)
    q, pool, *rest = arguments
    out = decode(q.astype(jnp.bfloat16), pool.astype(jnp.bfloat16), *rest)
    assert out.dtype == jnp.bfloat16
    # Scores of size 5 are made of inputs rounded to 2^-9 of theirs; they stand in the exponent.
    assert_close(out.astype(np.float32), by_hand(q, rows), 0.03)


@pytest.mark.gpu
def test_lengths_on_this_device():
    for lengths in LENGTHS.values():
        for implementation in ("xla", "reference"):
            test_lengths(lengths, implementation)
