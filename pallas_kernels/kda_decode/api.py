"""Kimi Delta Attention for one token of each sequence, from projections to gated output."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common import dispatch
from pallas_kernels.kda_decode import xla
from pallas_kernels.kda_decode.types import KDACache, KDAWeights


def kda_decode(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    f: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    gate: Float[Array, "B H V"],
    weights: KDAWeights,
    cache: KDACache,
    layer: int | Int[Array, ""],
    slots: Int[Array, " B"] | None = None,
    *,
    gate_lower_bound: float | None,
    eps: float,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B H V"], KDACache]:
    """One step of every sequence; all activations are raw outputs of their projections.

    1. q, k, v = silu(short convolution of the slot's tail and the new row); the tail moves on.
    2. q, k L2-normalised; g = decay gate of f; beta = sigmoid(beta). (architecture: Kimi Linear)
    3. S' = diag(exp(g)) S;  u = beta (v - k S');  S = S' + k^T u;  o = K^-1/2 q S.
    4. o * rsqrt(mean(o^2) + eps) * o_norm * sigmoid(gate), in gate's dtype.

    The cache comes whole with a layer index and is returned with the rows of `slots` updated.
    slots None means that row b is slot b and every slot takes part. Two rows must not name one
    slot; padding rows name a slot reserved for them. Inside, all is float32; q, k, v after step 1
    and o before step 4 are rounded to the activations' dtype.
    """
    return dispatch.first_supported(
        implementation,
        {"xla": xla.kda_decode},
        q,
        k,
        v,
        f,
        beta,
        gate,
        weights,
        cache,
        layer,
        slots,
        gate_lower_bound=gate_lower_bound,
        eps=eps,
    )
