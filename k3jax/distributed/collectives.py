"""Every exchange between devices, by name.

A call on an axis of size 1, or outside a mesh, returns its argument, so that a layer runs alone in
a notebook and one code path serves one device and many.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def axis_size(axis: str) -> int:
    """Devices along `axis`; 1 outside a mesh."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        return 1


def axis_index(axis: str):
    """This device's place along `axis`; 0 outside a mesh."""
    return jax.lax.axis_index(axis) if axis_size(axis) > 1 else jnp.int32(0)


def all_reduce(x: Shaped[Array, "..."], axis: str) -> Shaped[Array, "..."]:
    """Sum over the devices of `axis`."""
    return jax.lax.psum(x, axis) if axis_size(axis) > 1 else x


def all_gather(x: Shaped[Array, "..."], axis: str, *, dim: int) -> Shaped[Array, "..."]:
    """The shards along array dimension `dim`, joined in device order."""
    if axis_size(axis) == 1:
        return x
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)
