"""Named sizes of kda_decode."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case
from pallas_kernels.kda_decode.types import KDACache, KDAWeights

_STATIC = {"gate_lower_bound": -5.0, "eps": 1e-5}


def make(
    key,
    *,
    batch,
    heads,
    key_dim,
    value_dim,
    slots=None,
    taps=4,
    dtype=jnp.bfloat16,
    state_dtype=jnp.float32,
):
    """One token for each sequence, in the last of two layers; slots in reverse order."""
    keys = iter(jax.random.split(key, 16))
    per_key, per_value = (heads, key_dim), (heads, value_dim)
    slots = slots or batch

    def normal(shape, dtype):
        return jax.random.normal(next(keys), shape, dtype)

    activations = [normal((batch, *rest), dtype) for rest in (per_key, per_key, per_value, per_key)]
    beta, gate = normal((batch, heads), dtype), normal((batch, *per_value), dtype)
    weights = KDAWeights(
        0.5 * normal((*per_key, taps), jnp.float32),
        0.5 * normal((*per_key, taps), jnp.float32),
        0.5 * normal((*per_value, taps), jnp.float32),
        normal((heads,), jnp.float32),
        normal(per_key, jnp.float32),
        1 + 0.1 * normal((value_dim,), jnp.float32),
    )
    cache = KDACache(
        normal((2, slots, heads, key_dim, value_dim), state_dtype),
        *(normal((2, slots, taps - 1, *rest), dtype) for rest in (per_key, per_key, per_value)),
    )
    order = jnp.arange(slots, slots - batch, -1, dtype=jnp.int32) - 1
    return (*activations, beta, gate, weights, cache, jnp.int32(1), order), {}


def _case(**sizes) -> Case:
    return Case(make, sizes, _STATIC)


_k3 = functools.partial(_case, heads=96, key_dim=128, value_dim=128)
_tiny = functools.partial(
    _case, batch=3, slots=5, heads=2, key_dim=16, value_dim=24, dtype=jnp.float32
)

CASES = {
    "tiny": _tiny(),
    "tiny_bf16_state": _tiny(state_dtype=jnp.bfloat16),
    "k3_1": _k3(batch=1),
    "k3_64": _k3(batch=64),
    "k3_tp8_64": _k3(batch=64, heads=12),
    "k3_tp8_256": _k3(batch=256, heads=12),
}
