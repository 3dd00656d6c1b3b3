"""Kimi Delta Attention in chunks: the WY form of the delta rule, safe for any decay.

Notation of the Kimi Linear report: within a chunk of C tokens, G is the running sum of the log
decays g. All pairwise factors are exp(G_r - G_s) with s <= r, at most 1, but a matrix product needs
them split as exp(G_r - ref) * exp(ref - G_s), and over a whole chunk either factor can leave the
range of float32 (64 tokens at g = -5 reach exp(320)). So a block of rows takes G at its first row
as `ref` for all columns before the block: both factors are then at most 1 whatever the gate,
nothing overflows, and what underflows is truly negligible. Inside a block the difference of each
pair is taken before exp.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.segments import ChunkGrid, Segments

CHUNK = 64
BLOCK = 16  # rows that share a reference
_HIGHEST = jax.lax.Precision.HIGHEST  # true float32 products: TF32 is too coarse here


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


def _decayed_scores(rows, columns, G):
    """sum_c rows[r, c] columns[s, c] exp(G[r, c] - G[s, c]) for s <= r, zero above; [..., C, C].

    `rows` is a tuple of arrays that share the factors.
    """
    size, channels = G.shape[-2:]
    blocks = (*G.shape[:-2], size // BLOCK, BLOCK)
    index = jnp.arange(size, dtype=jnp.int32).reshape(-1, BLOCK)
    decay = G.reshape(*blocks, channels)
    reference = decay[..., :1, :]

    # Columns before the block: [..., R, C, channels], each seen from its row block's reference.
    is_before = _lead(index[:, :1] > jnp.arange(size, dtype=jnp.int32)[None, :], G)
    distance = jnp.where(is_before[..., None], reference - G[..., None, :, :], -jnp.inf)
    far = columns[..., None, :, :] * jnp.exp(distance)
    to_row = jnp.exp(decay - reference)

    # Columns of the block itself: one fused multiply-exp-reduce, nothing of its size is stored.
    is_causal = _lead(index[:1, :, None] >= index[:1, None, :], G)
    distance = decay[..., :, None, :] - decay[..., None, :, :]
    near = jnp.exp(jnp.where(is_causal[..., None], distance, -jnp.inf))
    near = near * columns.reshape(*blocks, channels)[..., None, :, :]
    own_block = _lead(jnp.eye(size // BLOCK, dtype=bool)[:, None, :, None], G)

    def scores(x):
        x = x.reshape(*blocks, channels)
        before = _dot("...rc,...sc->...rs", x * to_row, far)
        own = jnp.sum(x[..., :, None, :] * near, axis=-1)
        own = jnp.where(own_block, own[..., :, None, :], 0.0)
        return before.reshape(*G.shape[:-1], size) + own.reshape(*G.shape[:-1], size)

    return [scores(x) for x in rows]


def _lead(x, like):
    """`x` with leading axes of size 1 for the leading axes of `like`."""
    return jnp.expand_dims(x, tuple(range(like.ndim - 2)))


def _unit_lower_inverse(matrix):
    """Inverse of I + L, with L the strictly lower part of `matrix` [..., C, C].

    By block forward substitution: [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]], which is
    M - M B M when M holds the inverses of A and C. Blocks double from 1 to C / 2. (The product
    (I - L)(I + L^2)(I + L^4)… has fewer factors but cancels catastrophically beyond 16 rows.)
    """
    size = matrix.shape[-1]
    part = jnp.arange(size, dtype=jnp.int32)
    levels: list[jax.Array] = []
    while len(levels) < size.bit_length() - 1:
        levels.append((part[:, None] % 2 == 1) & (part[:, None] - 1 == part[None, :]))
        part = part // 2

    def double(inverse, below):
        lower = jnp.where(jnp.expand_dims(below, tuple(range(matrix.ndim - 2))), matrix, 0.0)
        step = _dot("...rc,...cs->...rs", lower, inverse)
        return inverse - _dot("...rc,...cs->...rs", inverse, step), None

    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), matrix.shape)
    return jax.lax.scan(double, identity, jnp.stack(levels))[0]


def _within_chunks(q, k, v, g, beta):
    """Everything that needs no state, for all chunks at once; [N, H, C, ...] each."""
    # The running sum as a product: XLA would fuse a cumsum into each of its readers and redo it.
    G = _dot("rs,nhsk->nhrk", jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32)), g)
    scale = beta[..., None]
    corrections, attention = _decayed_scores((k * scale, q), k, G)
    inverse = _unit_lower_inverse(corrections)
    return {
        "w": _dot("nhrs,nhsk->nhrk", inverse, k * scale * jnp.exp(G)),
        "u": _dot("nhrs,nhsv->nhrv", inverse, v * scale),
        "attention": attention,
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
    on_the_way = taken[taken_at[entry]]  # equal checkpoints share the row that one of them wrote
    return outputs, finals, jnp.where(at_end[:, None, None, None], finals[sequence], on_the_way)
