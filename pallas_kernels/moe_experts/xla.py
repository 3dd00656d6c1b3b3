"""Routed experts in XLA, three ways; none ever decodes a whole layer.

gathered: few tokens; the chosen experts are gathered and met one row each by multiply-and-sum, so
    that gather, decoding and product fuse and every byte of a chosen expert is read once.
sorted_loop: many tokens; assignments sorted by expert, a loop over the experts that have any, one
    of them decoded at a time.
ragged: dense weights only; lax.ragged_dot, which can be differentiated.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.attention import matmul_precision
from pallas_kernels.moe_experts.types import DenseExperts, MXFP4Experts

MAX_GATHERED = 128  # assignments: 8 tokens of a top-16 model
MAX_TILE = 256  # rows that one expert takes at a time


def gathered(
    x: Float[Array, "T Z"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: DenseExperts | MXFP4Experts,
    activation: Callable,
) -> Float[Array, "T Z"]:
    """See api.moe_experts."""
    if ids.size > MAX_GATHERED:
        raise NotImplementedError(f"{ids.size} assignments; gathers at most {MAX_GATHERED}")
    chosen = experts.take(ids, jnp.float32)  # [T, k, 2, F, Z]; fused into the sums below
    rows = x.astype(jnp.float32)[:, None, None, None, :]
    hidden = jnp.sum(chosen.gate_up * rows, axis=-1).astype(x.dtype)
    hidden = activation(hidden[:, :, 0], hidden[:, :, 1]).astype(jnp.float32)
    y = jnp.sum(chosen.down * hidden[:, :, None, :], axis=-1).astype(x.dtype)
    return _combine(y, weights)


def sorted_loop(
    x: Float[Array, "T Z"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: DenseExperts | MXFP4Experts,
    activation: Callable,
) -> Float[Array, "T Z"]:
    """See api.moe_experts."""
    num_assignments, top_k = ids.size, ids.shape[1]
    num_experts = jax.tree.leaves(experts)[0].shape[0]
    order, counts = _sort_by_expert(ids, num_experts)
    begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
    active = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    mean = -(-num_assignments // num_experts)
    tile = min(MAX_TILE, max(8, 1 << (mean - 1).bit_length()))
    token = jnp.pad(order // top_k, (0, tile))
    precision = matmul_precision(x.dtype)

    def one_expert(i, out):
        expert = active[i]
        w = experts.take(expert, x.dtype)

        def one_tile(j, out):
            # The tile may run into the rows of later experts: those are written after it.
            first = begins[expert] + j * tile
            rows = x[jax.lax.dynamic_slice_in_dim(token, first, tile)]
            gate, up = (_rows_times(rows, w.gate_up[n], precision) for n in (0, 1))
            y = _rows_times(activation(gate, up), w.down, precision)
            return jax.lax.dynamic_update_slice_in_dim(out, y, first, axis=0)

        return jax.lax.fori_loop(jnp.int32(0), (counts[expert] + tile - 1) // tile, one_tile, out)

    out = jnp.zeros((num_assignments + tile, x.shape[1]), x.dtype)
    num_active = jnp.sum(counts > 0, dtype=jnp.int32)
    out = jax.lax.fori_loop(jnp.int32(0), num_active, one_expert, out)
    return _combine(_unsort(out, order, ids.shape), weights)


def ragged(
    x: Float[Array, "T Z"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: DenseExperts | MXFP4Experts,
    activation: Callable,
) -> Float[Array, "T Z"]:
    """See api.moe_experts."""
    if not isinstance(experts, DenseExperts):
        raise NotImplementedError("lax.ragged_dot takes dense experts only")
    order, counts = _sort_by_expert(ids, experts.down.shape[0])
    rows = x[order // ids.shape[1]]
    contract_last = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )

    def product(a, w):
        return jax.lax.ragged_dot_general(
            a, w.astype(a.dtype), counts, contract_last, precision=matmul_precision(a.dtype)
        )

    gate, up = (product(rows, experts.gate_up[:, i]) for i in (0, 1))
    y = product(activation(gate, up), experts.down)
    return _combine(_unsort(y, order, ids.shape), weights)


def _rows_times(x, w, precision):
    """x @ w.T with w stored [out, in]."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision)


def _sort_by_expert(ids, num_experts):
    """Assignments (token * k + place) in order of expert, and how many each expert has."""
    flat = ids.reshape(-1)
    counts = jnp.sum(
        flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)[None, :], axis=0, dtype=jnp.int32
    )
    return jnp.argsort(flat, stable=True).astype(jnp.int32), counts


def _unsort(rows, order, shape):
    """Rows of sorted assignments back to [T, k, Z]."""
    place = jnp.argsort(order).astype(jnp.int32)
    return rows[place].reshape(*shape, rows.shape[-1])


def _combine(y, weights):
    """Weighted sum over the k choices, in float32 and in the router's order."""
    return jnp.sum(y.astype(jnp.float32) * weights[..., None], axis=1)
