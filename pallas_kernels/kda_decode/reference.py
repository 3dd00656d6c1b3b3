"""One KDA token a sequence in plain jax.numpy: convolution, gates, recurrence, gated norm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.functions import decay_gate, gated_rms_norm, l2_normalize
from pallas_kernels.common.pools import set_rows
from pallas_kernels.kda_decode.types import KDACache, KDAWeights
from pallas_kernels.kda_prefill.reference import kda_step


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
    slots: Int[Array, " B"] | None,
    gate_lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "B H V"], KDACache]:
    """See api.kda_decode."""

    def read(pool):
        return pool[layer] if slots is None else pool[layer, slots]

    def write(pool, value):
        return set_rows(pool, (layer,) if slots is None else (layer, slots), value)

    def convolve(x, weight, pool):
        window = jnp.concatenate([read(pool), x[:, None].astype(pool.dtype)], axis=1)
        taps = jnp.moveaxis(weight.astype(jnp.float32), -1, 0)[None]  # [1, W, H, d]
        y = jnp.sum(window.astype(jnp.float32) * jnp.broadcast_to(taps, window.shape), axis=1)
        return jax.nn.silu(y).astype(x.dtype), write(pool, window[:, 1:])

    q, conv_q = convolve(q, weights.conv_q, cache.conv_q)
    k, conv_k = convolve(k, weights.conv_k, cache.conv_k)
    v, conv_v = convolve(v, weights.conv_v, cache.conv_v)
    o, state = kda_step(
        read(cache.state),
        l2_normalize(q),
        l2_normalize(k),
        v,
        decay_gate(f, weights.A_log, weights.dt_bias, gate_lower_bound),
        jax.nn.sigmoid(beta.astype(jnp.float32)),
    )
    out = gated_rms_norm(o.astype(gate.dtype), gate, weights.o_norm, eps)
    return out, KDACache(write(cache.state, state), conv_q, conv_k, conv_v)
