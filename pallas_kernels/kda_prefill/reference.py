"""Kimi Delta Attention token by token: the definition (Kimi Linear, the gated delta rule).

H heads, K key channels, V value channels, as the literature names them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.segments import Segments


def kda_step(
    state: Float[Array, "*B H K V"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
    g: Float[Array, "*B H K"],
    beta: Float[Array, "*B H"],
) -> tuple[Float[Array, "*B H V"], Float[Array, "*B H K V"]]:
    """One token: decay the state, correct it by the delta rule, read it.

    S' = diag(exp(g)) S;  u = beta (v - k S');  S = S' + k^T u;  o = K^-1/2 q S. Float32 throughout.
    Sums over K are multiply-and-add, since a matrix product of one row gains nothing.
    """
    q, k, v, g, beta = (a.astype(jnp.float32) for a in (q, k, v, g, beta))
    state = state.astype(jnp.float32) * jnp.exp(g)[..., None]
    predicted = jnp.sum(k[..., None] * state, axis=-2)
    u = beta[..., None] * (v - predicted)
    state = state + k[..., None] * u[..., None, :]
    return q.shape[-1] ** -0.5 * jnp.sum(q[..., None] * state, axis=-2), state


def kda_prefill(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    initial_state: Float[Array, "B H K V"],
    segments: Segments,
    phase: Int[Array, " B"] | None = None,
    checkpoints: tuple[Int[Array, " M"], Int[Array, " M"]] | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "B H K V"], Float[Array, "M H K V"] | None]:
    """See api.kda_prefill. Scans the packed axis; sequences of one call must be in packed order."""
    del phase  # a token-by-token scan has no chunk grid
    num_tokens = q.shape[0]
    ids = segments.ids(num_tokens)

    def without_padding(x):  # zeros leave the state as it is, and carry no NaN into gradients
        mask = jnp.expand_dims(ids >= 0, tuple(range(1, x.ndim)))
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    def step(states, token):
        *token, b = token
        row = jnp.maximum(b, 0)
        o, new = kda_step(states[row], *token)
        return states.at[row].set(new), (jnp.where(b >= 0, o, 0.0), new)

    tokens = (*(without_padding(x) for x in (q, k, v, g, beta)), ids)
    start = initial_state.astype(jnp.float32)
    final, (o, history) = jax.lax.scan(step, start, tokens)
    if checkpoints is None:
        return o.astype(v.dtype), final, None
    sequence, length = checkpoints
    last = jnp.clip(segments.starts[sequence] + length - 1, 0, num_tokens - 1)
    taken = jnp.where((length > 0)[:, None, None, None], history[last], start[sequence])
    return o.astype(v.dtype), final, taken
