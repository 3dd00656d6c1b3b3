"""Kimi Delta Attention in chunks: the WY form of the delta rule, safe for any decay.

Notation of the Kimi Linear report: within a chunk of C tokens, G is the running sum of the log
decays g. All pairwise factors are exp(G_r - G_s) with s <= r, at most 1, but a matrix product needs
them split as exp(G_r - ref) * exp(ref - G_s), and over a whole chunk either factor can leave the
range of float32 (64 tokens at g = -5 reach exp(320)). So pairs are grouped by halving: at each
level the second half of a block meets its first half, with `ref` = G at the start of the second
half. Both factors are then at most 1 whatever the gate, nothing overflows, and what underflows is
truly negligible. Leaves of 8 tokens take the difference of each pair. The same halving inverts
the unit triangular matrix by block substitution.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.segments import ChunkGrid, Segments

CHUNK = 64
LEAF = 8
_HIGHEST = jax.lax.Precision.HIGHEST  # true float32 products; TF32 is too coarse for the inverse


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
    """See api.kda_prefill."""
    grid = ChunkGrid(segments, q.shape[0], CHUNK, phase)

    def chunked(x):  # [T, H, ...] -> [N, H, C, ...] in float32
        return jnp.moveaxis(grid.split(x).astype(jnp.float32), 2, 1)

    # Padding rows have k = v = q = 0, beta = 0 and g = 0: they leave the state untouched.
    chunks = _within_chunks(chunked(q), chunked(k), chunked(v), chunked(g), chunked(beta))
    outputs, final, taken = _across_chunks(chunks, initial_state, grid, checkpoints)
    return grid.join(jnp.moveaxis(outputs, 2, 1)).astype(v.dtype), final, taken


def _dot(equation: str, a, b):
    return jnp.einsum(equation, a, b, precision=_HIGHEST, preferred_element_type=jnp.float32)


def _leaf_scores(rows, columns, G):
    """Scores inside leaves of LEAF tokens, s <= r, with the difference taken before exp. [..., n, r, s].

    One fused multiply-exp-reduce: nothing of size LEAF x C x K is stored.
    """
    leaves = (*G.shape[:-2], G.shape[-2] // LEAF, LEAF, G.shape[-1])
    decay = G.reshape(leaves)
    difference = decay[..., :, None, :] - decay[..., None, :, :]
    index = jnp.arange(LEAF, dtype=jnp.int32)
    causal = jnp.expand_dims(index[:, None] >= index[None, :], (*range(len(leaves) - 2), -1))
    factors = jnp.exp(jnp.where(causal, difference, -jnp.inf))
    keyed = factors * columns.reshape(leaves)[..., None, :, :]
    return [jnp.sum(x.reshape(leaves)[..., :, None, :] * keyed, axis=-1) for x in rows]


def _scores_below(rows, columns, G):
    """Scores between leaves by halving: for h = LEAF, 2 LEAF, … the [..., C / 2h, h, h] of the second
    half of each block of 2h tokens against its first half. One list of levels for each of `rows`.
    """
    levels: list[list] = [[] for _ in rows]
    half = LEAF
    while half < G.shape[-2]:
        blocks = (*G.shape[:-2], G.shape[-2] // (2 * half), 2, half, G.shape[-1])
        decay = G.reshape(blocks)
        reference = decay[..., 1, :1, :]
        to_row = jnp.exp(decay[..., 1, :, :] - reference)
        to_column = jnp.exp(reference - decay[..., 0, :, :])
        keyed = columns.reshape(blocks)[..., 0, :, :] * to_column
        for level, x in zip(levels, rows, strict=True):
            queried = x.reshape(blocks)[..., 1, :, :] * to_row
            level.append(_dot("...rc,...sc->...rs", queried, keyed))
        half *= 2
    return levels


def _lower_triangle(leaves, levels):
    """The [..., C, C] matrix from its diagonal leaves and the levels below them."""
    for lower in levels:
        leaves = _join(leaves, lower)
    return leaves[..., 0, :, :]


def _unit_lower_inverse(leaves, levels):
    """Inverse of I + L from the strictly lower leaves and the levels of L.

    Leaves by (I - L)(I + L^2)(I + L^4), exact since L^8 = 0; that product cancels catastrophically
    for wide blocks, so from there on by block forward substitution:
    [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]].
    """
    identity = jnp.broadcast_to(jnp.eye(LEAF, dtype=jnp.float32), leaves.shape)
    inverse, power = identity - leaves, leaves
    for _ in range(LEAF.bit_length() - 2):
        power = _dot("...rc,...cs->...rs", power, power)
        inverse = inverse + _dot("...rc,...cs->...rs", inverse, power)
    for lower in levels:
        a, c = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _join(inverse, -_dot("...rc,...cs->...rs", c, _dot("...rc,...cs->...rs", lower, a)))
    return inverse[..., 0, :, :]


def _join(blocks, lower):
    """Diagonal blocks [..., 2n, h, h] in pairs, with `lower` [..., n, h, h] below each pair."""
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    bottom = jnp.concatenate([lower, second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def _within_chunks(q, k, v, g, beta):
    """Everything that needs no state, for all chunks at once; [N, H, C, ...] each."""
    G = jnp.cumsum(g, axis=2)
    rows = (k * beta[..., None], q)
    key_leaves, query_leaves = _leaf_scores(rows, k, G)
    key_levels, query_levels = _scores_below(rows, k, G)
    strictly_lower = jnp.tril(jnp.ones((LEAF, LEAF), jnp.float32), -1)
    key_leaves = key_leaves * jnp.broadcast_to(strictly_lower, key_leaves.shape)
    inverse = _unit_lower_inverse(key_leaves, key_levels) * beta[..., None, :]
    return {
        "w": _dot("nhrs,nhsk->nhrk", inverse, k * jnp.exp(G)),
        "u": _dot("nhrs,nhsv->nhrv", inverse, v),
        "attention": _lower_triangle(query_leaves, query_levels),
        "q": q * jnp.exp(G),
        "k": k * jnp.exp(G[:, :, -1:] - G),
        "decay": jnp.exp(G[:, :, -1]),
    }


def _across_chunks(chunks, initial_state, grid: ChunkGrid, checkpoints):
    """The sequential part: carries the state from chunk to chunk of each sequence."""
    start = initial_state.astype(jnp.float32)
    batch, scale = start.shape[0], chunks["q"].shape[-1] ** -0.5
    num_taken = 0 if checkpoints is None else checkpoints[0].shape[0]
    taken_at = jnp.full((grid.num_chunks,), num_taken, jnp.int32)
    taken = jnp.zeros((num_taken + 1, *start.shape[1:]), jnp.float32)
    if checkpoints is not None:
        sequence, length = checkpoints
        # A checkpoint is the sequence's final state, or the state on entry to a chunk.
        at_end = length == grid.lens[sequence]
        entry = grid.begins[sequence] + (grid.skipped[sequence] + length) // CHUNK
        entry = jnp.where(at_end, grid.num_chunks, entry)
        taken_at = taken_at.at[entry].set(jnp.arange(num_taken, dtype=jnp.int32), mode="drop")

    def step(carry, chunk):
        state, finals, taken = carry
        x, b, first, last, at = chunk
        state = jnp.where(first, start[b], state)
        if num_taken:
            taken = taken.at[at].set(state)
        u = x["u"] - _dot("hrk,hkv->hrv", x["w"], state)
        o = _dot("hrk,hkv->hrv", x["q"], state) + _dot("hrs,hsv->hrv", x["attention"], u)
        state = state * x["decay"][..., None] + _dot("hsk,hsv->hkv", x["k"], u)
        finals = finals.at[jnp.where(last, b, batch)].set(state, mode="drop")
        return (state, finals, taken), scale * o

    rows = (chunks, grid.sequence, grid.first, grid.last, taken_at)
    carry = (jnp.zeros_like(start[0]), start, taken)
    (_, finals, taken), outputs = jax.lax.scan(step, carry, rows)
    if checkpoints is None:
        return outputs, finals, None
    return outputs, finals, jnp.where(at_end[:, None, None, None], finals[sequence], taken[:-1])
