"""Named sizes of short_conv."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case
from pallas_kernels.common.segments import Segments


def make(key, *, tokens, sequences, heads, width, taps=4, dtype=jnp.bfloat16):
    """Sequences of equal length, each with a tail."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (tokens, heads, width), dtype)
    weight = 0.5 * jax.random.normal(keys[1], (heads, width, taps), jnp.float32)
    tail = jax.random.normal(keys[2], (sequences, taps - 1, heads, width), dtype)
    return (x, weight, tail, Segments.rectangle(sequences, tokens // sequences)), {}


def _case(**sizes) -> Case:
    return Case(make, sizes)


_k3 = functools.partial(_case, heads=96, width=128)

CASES = {
    "tiny": _case(tokens=24, sequences=2, heads=2, width=8, dtype=jnp.float32),
    "k3": _k3(tokens=8192, sequences=1),
    "k3_ragged": _k3(tokens=8192, sequences=16),
    "k3_tp8": _k3(tokens=8192, sequences=1, heads=12),
}
