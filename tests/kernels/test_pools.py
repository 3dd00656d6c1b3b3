"""Writing rows of a pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.pools import set_rows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_set_rows(dtype):
    """Bit for bit what indexing writes, NaN too; indices past the end write nothing."""
    rng = np.random.default_rng(3)
    pool = jnp.asarray(rng.standard_normal((2, 5, 3)), dtype)
    rows = rng.standard_normal((3, 3)).astype(np.float32)
    rows[0, 1] = np.nan
    got = jax.jit(lambda pool, rows: set_rows(pool, (1, jnp.asarray([4, 0, 5])), rows))(pool, rows)
    expected = np.array(pool)
    expected[1, [4, 0]] = np.asarray(jnp.asarray(rows[:2]).astype(dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
