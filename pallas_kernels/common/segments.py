"""Ragged batches: which tokens of one packed axis belong to which sequence."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """B disjoint runs of tokens on a packed axis of T tokens; tokens in no run are padding.

    starts: first token of each sequence. lens: its number of tokens, 0 for an empty one.
    """

    starts: Int[Array, " B"]
    lens: Int[Array, " B"]

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Array, " B_plus_1"]) -> "Segments":
        """Sequences that follow each other without a gap."""
        cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
        return cls(cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1])

    @classmethod
    def rectangle(cls, batch: int, width: int, lens: Int[Array, " B"] | None = None) -> "Segments":
        """Rows of a right-padded [batch, width] array, flattened."""
        starts = jnp.arange(batch, dtype=jnp.int32) * width
        full = jnp.full((batch,), width, jnp.int32)
        return cls(starts, full if lens is None else jnp.asarray(lens, jnp.int32))

    def membership(self, num_tokens: int) -> Bool[Array, "T B"]:
        """Whether token t belongs to sequence b."""
        t = jax.lax.broadcasted_iota(jnp.int32, (num_tokens, self.starts.shape[0]), 0)
        starts = jnp.broadcast_to(self.starts, t.shape)
        return (t >= starts) & (t < starts + jnp.broadcast_to(self.lens, t.shape))

    def ids(self, num_tokens: int) -> Int[Array, " T"]:
        """Sequence of each token, -1 for padding."""
        member = self.membership(num_tokens)
        found = jnp.argmax(member, axis=1).astype(jnp.int32)
        return jnp.where(jnp.any(member, axis=1), found, -1)

    def offsets(self, num_tokens: int) -> Int[Array, " T"]:
        """Place of each token inside its sequence; meaningless for padding."""
        ids = jnp.maximum(self.ids(num_tokens), 0)
        return jnp.arange(num_tokens, dtype=jnp.int32) - self.starts[ids]


class ChunkGrid:
    """Packed tokens regrouped into chunks of `size`, each of one sequence only.

    Every sequence begins a new chunk, `skipped[b] % size` rows into it. There are at most
    `num_chunks` (static) chunks; sequence [N] is the one of each chunk, first and last mark the
    ends of a sequence (both False on unused chunks), valid [N, size] the rows that hold a token.
    """

    def __init__(
        self,
        segments: Segments,
        num_tokens: int,
        size: int,
        skipped: Int[Array, " B"] | None = None,
    ):
        starts, self.lens = segments.starts, segments.lens
        batch = starts.shape[0]
        self.skipped = jnp.zeros_like(self.lens) if skipped is None else skipped % size
        worst_padding = batch * (size - 1) * (1 if skipped is None else 2)
        self.num_chunks = max(1, (num_tokens + worst_padding) // size)
        counts = jnp.where(self.lens > 0, (self.skipped + self.lens + size - 1) // size, 0)
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        self.begins = ends - counts

        chunk = jnp.arange(self.num_chunks, dtype=jnp.int32)
        passed = jnp.sum(chunk[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        used = passed < batch
        self.sequence = jnp.minimum(passed, batch - 1)
        self.first = used & (chunk == self.begins[self.sequence])
        self.last = used & (chunk == ends[self.sequence] - 1)
        row = jnp.arange(size, dtype=jnp.int32)[None, :]
        place = (chunk - self.begins[self.sequence])[:, None] * size + row
        place = place - self.skipped[self.sequence][:, None]
        self.valid = used[:, None] & (place >= 0) & (place < self.lens[self.sequence][:, None])
        self._token = jnp.where(self.valid, starts[self.sequence][:, None] + place, 0)

        ids = segments.ids(num_tokens)
        shifted = segments.offsets(num_tokens) + self.skipped[jnp.maximum(ids, 0)]
        chunk_of_token = self.begins[jnp.maximum(ids, 0)] + shifted // size
        self._is_token = ids >= 0
        self._chunk_of_token = jnp.clip(chunk_of_token, 0, self.num_chunks - 1)
        self._row_of_token = shifted % size

    def split(self, x: Shaped[Array, "T *rest"]) -> Shaped[Array, "N size *rest"]:
        """Tokens into their chunk rows; zeros where a row has none."""
        mask = jnp.expand_dims(self.valid, tuple(range(2, x.ndim + 1)))
        return jnp.where(mask, x[self._token], jnp.zeros((), x.dtype))

    def join(self, x: Shaped[Array, "N size *rest"]) -> Shaped[Array, "T *rest"]:
        """The way back; zeros for padding tokens."""
        mask = jnp.expand_dims(self._is_token, tuple(range(1, x.ndim - 1)))
        taken = x[self._chunk_of_token, self._row_of_token]
        return jnp.where(mask, taken, jnp.zeros((), x.dtype))
