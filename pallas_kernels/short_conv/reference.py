"""Short convolution over packed sequences in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.segments import Segments


def short_conv(
    x: Float[Array, "T H d"],
    weight: Float[Array, "H d W"],
    tail: Float[Array, "B W_minus_1 H d"],
    segments: Segments,
) -> Float[Array, "T H d"]:
    """See api.short_conv."""
    num_tokens, width = x.shape[0], weight.shape[-1]
    w = jnp.moveaxis(weight.astype(jnp.float32), -1, 0)  # [W, H, d]
    shifted = jnp.pad(x.astype(jnp.float32), ((width - 1, 0), (0, 0), (0, 0)))
    offsets = segments.offsets(num_tokens)
    y = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):  # the token W - 1 - tap places earlier, if the sequence has it here
        inside = (offsets >= width - 1 - tap)[:, None, None]
        row = jax.lax.slice_in_dim(shifted, tap, tap + num_tokens)
        y = y + jnp.where(inside, row, 0.0) * w[tap][None]
    return jax.nn.silu(_add_tail(y, w, tail, segments)).astype(x.dtype)


def _add_tail(y, w, tail, segments: Segments):
    """Adds what earlier tokens (the tail) contribute to the first W - 1 tokens of each sequence."""
    rows = tail.shape[1]
    tail = tail.astype(jnp.float32)
    # Token `place` meets tail rows place .. W - 2 through taps 0 .. W - 2 - place.
    extra = [jnp.sum(tail[:, place:] * w[None, : rows - place], axis=1) for place in range(rows)]
    place = jnp.arange(rows, dtype=jnp.int32)[None, :]
    exists = place < segments.lens[:, None]
    target = jnp.where(exists, segments.starts[:, None] + place, y.shape[0])
    return y.at[target].add(jnp.stack(extra, axis=1), mode="drop")


def conv_tails(
    x: Float[Array, "T H d"],
    tail: Float[Array, "B W_minus_1 H d"],
    segments: Segments,
    sequence: Int[Array, " M"],
    length: Int[Array, " M"],
) -> Float[Array, "M W_minus_1 H d"]:
    """See api.conv_tails."""
    num_rows = tail.shape[1]
    # Row i of the answer is row length + i of the sequence's old tail followed by its new tokens.
    row = length[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None, :]
    old = tail[sequence[:, None], jnp.clip(row, 0, num_rows - 1)]
    token = segments.starts[sequence][:, None] + row - num_rows
    new = x[jnp.clip(token, 0, x.shape[0] - 1)].astype(tail.dtype)
    return jnp.where((row < num_rows)[..., None, None], old, new)
