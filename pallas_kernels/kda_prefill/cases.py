"""Named sizes of kda_prefill."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case
from pallas_kernels.common.functions import l2_normalize
from pallas_kernels.common.segments import Segments


def make(key, *, tokens, sequences, heads, key_dim, value_dim, dtype=jnp.bfloat16):
    """Sequences of equal length that continue a state; decays in (-5, 0), as K3 bounds them."""
    keys = jax.random.split(key, 6)
    per_key, per_value = (tokens, heads, key_dim), (tokens, heads, value_dim)
    q, k = (
        l2_normalize(jax.random.normal(key, per_key, jnp.float32)).astype(dtype) for key in keys[:2]
    )
    v = jax.random.normal(keys[2], per_value, dtype)
    g = -5 * jax.nn.sigmoid(3 * jax.random.normal(keys[3], per_key, jnp.float32) - 3)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], per_key[:2], jnp.float32))
    state = jax.random.normal(keys[5], (sequences, heads, key_dim, value_dim), jnp.float32)
    return (q, k, v, g, beta, state, Segments.rectangle(sequences, tokens // sequences)), {}


def _case(**sizes) -> Case:
    return Case(make, sizes)


_k3 = functools.partial(_case, heads=96, key_dim=128, value_dim=128)

CASES = {
    "tiny": _case(tokens=100, sequences=1, heads=2, key_dim=8, value_dim=12, dtype=jnp.float32),
    "k3": _k3(tokens=8192, sequences=1),
    "k3_ragged": _k3(tokens=8192, sequences=16),
    "k3_tp8": _k3(tokens=8192, sequences=1, heads=12),
    "k3_tp8_long": _k3(tokens=32768, sequences=1, heads=12),
}
