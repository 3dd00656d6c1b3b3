"""How rows of a cache pool are written."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def set_rows(
    pool: Float[Array, "*pool"], index: tuple, rows: Float[Array, "*rows"]
) -> Float[Array, "*pool"]:
    """pool.at[index].set(rows) in the pool's dtype; rows with an index past its end are dropped."""
    rows = rows.astype(pool.dtype)

    def plain(pool, rows):
        return pool.at[index].set(rows, mode="drop")

    def as_integers(pool, rows):
        kind = {1: jnp.uint8, 2: jnp.uint16}[pool.dtype.itemsize]
        view = jax.lax.bitcast_convert_type
        return view(plain(view(pool, kind), view(rows, kind)), pool.dtype)

    if pool.dtype.itemsize >= 4:
        return plain(pool, rows)
    # To scatter into narrow floats XLA's CPU backend widens the whole pool; integers stay narrow.
    return jax.lax.platform_dependent(pool, rows, cpu=as_integers, default=plain)
