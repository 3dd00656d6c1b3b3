"""Short causal convolution over packed sequences, and the tails that continue it."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common import dispatch
from pallas_kernels.common.segments import Segments
from pallas_kernels.short_conv import xla


def short_conv(
    x: Float[Array, "T H d"],
    weight: Float[Array, "H d W"],
    tail: Float[Array, "B W_minus_1 H d"],
    segments: Segments,
    *,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "T H d"]:
    """y[t] = silu(sum_j weight[..., j] x[t - (W-1) + j]), each sequence continuing its own tail.

    tail[b] holds the W - 1 inputs before the sequence's first token here, oldest first, zeros at
    the start of a sequence. Tap W - 1 is the current token. Accumulates in float32, returns
    x.dtype. Rows of padding tokens are meaningless. (Kimi Linear, section on short convolutions.)
    """
    return dispatch.first_supported(
        implementation, {"xla": xla.short_conv}, x, weight, tail, segments
    )


def conv_tails(
    x: Float[Array, "T H d"],
    tail: Float[Array, "B W_minus_1 H d"],
    segments: Segments,
    sequence: Int[Array, " M"],
    length: Int[Array, " M"],
    *,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "M W_minus_1 H d"]:
    """The tail of `sequence[m]` after its first `length[m]` tokens here (0: the old tail)."""
    return dispatch.first_supported(
        implementation, {"xla": xla.conv_tails}, x, tail, segments, sequence, length
    )
