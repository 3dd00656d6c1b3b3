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
    xf = x.astype(jnp.float32)
    offsets = segments.offsets(num_tokens)
    w = weight.astype(jnp.float32)
    y = xf * jnp.broadcast_to(w[..., width - 1], x.shape)
    for back in range(1, width):  # the token `back` places earlier, if the sequence has it here
        earlier = jnp.pad(xf, ((back, 0), (0, 0), (0, 0)))[:num_tokens]
        inside = jnp.broadcast_to((offsets >= back)[:, None, None], x.shape)
        tap = jnp.broadcast_to(w[..., width - 1 - back], x.shape)
        y = y + jnp.where(inside, earlier, 0.0) * tap
    return jax.nn.silu(_add_tail(y, w, tail, segments)).astype(x.dtype)


def _add_tail(y, w, tail, segments: Segments):
    """Adds what earlier tokens (the tail) contribute to the first W - 1 tokens of each sequence."""
    num_tokens, width = y.shape[0], w.shape[-1]
    tail = tail.astype(jnp.float32)
    for place in range(width - 1):
        # Token `place` sees tail rows place .. W-2 through taps 0 .. W-2-place.
        taps = jnp.moveaxis(w[..., : width - 1 - place], -1, 0)  # [W-1-place, H, d]
        rows = tail[:, place:]
        extra = jnp.sum(rows * jnp.broadcast_to(taps[None], rows.shape), axis=1)
        target = jnp.where(segments.lens > place, segments.starts + place, num_tokens)
        y = y.at[target].add(extra, mode="drop")
    return y


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
