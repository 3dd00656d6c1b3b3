"""Short convolution and its tails against the goldens and a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.segments import Segments
from pallas_kernels.short_conv import conv_tails, short_conv
from tests.kernels import oracle
from tests.kernels.oracle import assert_close, on_host

TOKENS, HEADS, WIDTH, TAPS = 30, 3, 8, 4


@on_host
@jax.jit
def run(x, weight, tail, segments, lengths):
    """Outputs, and the tails after `lengths` tokens of each sequence."""
    sequence = jnp.arange(len(lengths), dtype=jnp.int32)
    y = short_conv(x, weight, tail, segments)
    return y, conv_tails(x, tail, segments, sequence, lengths)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, HEADS, WIDTH)).astype(np.float32)
    weight = rng.standard_normal((HEADS, WIDTH, TAPS)).astype(np.float32)
    tail = rng.standard_normal((3, TAPS - 1, HEADS, WIDTH)).astype(np.float32)
    return x, weight, tail


def segments_of(starts, lens):
    return Segments(jnp.asarray(starts, jnp.int32), jnp.asarray(lens, jnp.int32))


def check_golden(path):
    z = np.load(path / "ops/short_conv.npz")
    batch, tokens, channels = z["x"].shape
    weight = z["weight"].reshape(1, channels, TAPS)

    def call(x, tail):
        segments = Segments.rectangle(batch, x.shape[1])
        rows = x.reshape(-1, 1, channels)
        y, tails = run(rows, weight, tail[:, :, None], segments, segments.lens)
        return y.reshape(x.shape), tails[:, :, 0]

    zero = np.zeros_like(z["state_in"])
    for x, tail, y, after in [
        (z["x"], zero, "y_zero_state", "state_out_zero_state"),
        (z["x"], z["state_in"], "y", "state_out"),
        (z["x"][:, :2], z["state_in"], "y_first2", "state_out_first2"),
    ]:
        got_y, got_tail = call(x, tail)
        assert_close(got_y, z[y], 1e-5, y)
        np.testing.assert_array_equal(got_tail, z[after])
    # SiLU is the last step.
    assert_close(call(z["x"], zero)[0], oracle.silu(z["y_zero_state_no_activation"]), 1e-5)


def test_golden(golden):
    check_golden(golden)


@pytest.mark.gpu
def test_golden_on_this_device(golden):
    check_golden(golden)


LENGTHS = {
    "shorter_than_the_tail": [1, 2, 3],
    "an_empty_one_between": [9, 0, 14],
    "full": [10, 10, 10],
    "nothing": [0, 0, 0],
}


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS.keys())
def test_packed_sequences(inputs, lens):
    """With gaps full of poison, and in another order on the axis than in the batch."""
    x, weight, tail = inputs
    starts = [20, 0, 10] if max(lens) <= 10 else [0, 9, 11]
    poisoned = np.full_like(x, np.nan)
    for start, length in zip(starts, lens, strict=True):
        poisoned[start : start + length] = x[start : start + length]
    y, tails = run(poisoned, weight, tail, segments_of(starts, lens), np.asarray(lens, np.int32))
    for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
        own = slice(start, start + length)
        assert_close(y[own], oracle.short_conv(x[own], weight, tail[b]), 1e-5)
        history = np.concatenate([tail[b], x[own]])
        np.testing.assert_array_equal(tails[b], history[length:])


@pytest.mark.parametrize("split", [1, 2, 3, 4, 11])
def test_any_split_is_no_split(inputs, split):
    x, weight, tail = inputs
    lengths = np.asarray([split, 0, 0], np.int32)
    whole, _ = run(x, weight, tail, segments_of([0, 30, 30], [20, 0, 0]), lengths)
    head, carried = run(x, weight, tail, segments_of([0, 30, 30], [split, 0, 0]), lengths)
    rest, _ = run(x, weight, carried, segments_of([split, 30, 30], [20 - split, 0, 0]), lengths)
    joined = np.concatenate([head[:split], rest[split:20]])
    assert_close(joined, whole[:20], 1e-6)  # the tail's taps are summed apart


def test_tails_inside_a_sequence(inputs):
    """Snapshots on the way: after 0 (the old tail), 1, 3 and all tokens."""
    x, _, tail = inputs
    sequence = np.asarray([1, 1, 1, 1, 0], np.int32)
    length = np.asarray([0, 1, 3, 12, 4], np.int32)
    segments = segments_of([0, 10, 30], [4, 12, 0])
    tails = on_host(jax.jit(conv_tails))(x, tail, segments, sequence, length)
    for got, b, n in zip(tails, sequence, length, strict=True):
        start = (0, 10)[b]
        np.testing.assert_array_equal(got, np.concatenate([tail[b], x[start : start + n]])[-3:])


def test_a_bfloat16_call_accumulates_in_float32(inputs):
    x, weight, tail = (np.asarray(a, jnp.bfloat16).astype(np.float32) for a in inputs)
    segments, lengths = segments_of([0, 10, 20], [10, 10, 10]), np.full(3, 10, np.int32)
    wide, _ = run(x, weight, tail, segments, lengths)
    narrow, tails = run(
        x.astype(jnp.bfloat16), weight, tail.astype(jnp.bfloat16), segments, lengths
    )
    assert narrow.dtype == tails.dtype == jnp.bfloat16
    # One rounding of the result, no more: half a unit in the last place of 8 bits.
    np.testing.assert_allclose(narrow.astype(np.float32), wide, rtol=2**-8, atol=1e-6)


def test_gradient_stays_inside_each_sequence(inputs):
    x, weight, tail = inputs
    segments = segments_of([0, 9, 20], [9, 0, 10])

    def loss(x):  # of the first sequence only
        return jnp.sum(short_conv(x, jnp.asarray(weight), jnp.asarray(tail), segments)[:9] ** 2)

    gradient = on_host(jax.jit(jax.grad(loss)))(x)
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient[:9]) and not np.any(gradient[9:])
