"""Choice of the next token on the device."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from k3jax.engine.request import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """`SamplingParams` of B sequences, one row each; the seed as two words."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, "B 2"]

    @classmethod
    def pack(cls, params: Sequence[SamplingParams]) -> "SamplingArrays":
        """A request without a seed gets one from the system's entropy."""
        seeds = [(secrets.randbits(64) if p.seed is None else p.seed) & (2**64 - 1) for p in params]
        return cls(
            jnp.asarray([p.temperature for p in params], jnp.float32),
            jnp.asarray([p.top_k for p in params], jnp.int32),
            jnp.asarray([p.top_p for p in params], jnp.float32),
            jnp.asarray([p.min_p for p in params], jnp.float32),
            jnp.asarray([(s >> 32, s & 0xFFFFFFFF) for s in seeds], np.uint32),
        )


def sample(
    logits: Float[Array, "B V"], params: SamplingArrays, position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Next token of each sequence; `position` is the index that it will have.

    Temperature 0 takes the first of the largest logits. Otherwise a Gumbel-max draw from the
    tempered and filtered distribution, with a key made of the sequence's seed and the position
    alone: batch mates, row and padding do not matter.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw():
        warm = params.temperature > 0
        scale = jnp.where(warm, params.temperature, 1.0)[:, None]
        tempered = logits.astype(jnp.float32) / scale
        kept = jnp.where(admitted(tempered, params), tempered, -jnp.inf)
        noise = jax.vmap(lambda seed, at: _gumbel(seed, at, logits.shape[-1]))(
            params.seed, position
        )
        return jnp.where(warm, jnp.argmax(kept + noise, axis=-1).astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy)


def admitted(tempered: Float[Array, "B V"], params: SamplingArrays) -> Bool[Array, "B V"]:
    """Which tokens pass min-p, then top-k, then top-p over what is left; always the likeliest."""
    vocab = tempered.shape[-1]
    order = jnp.argsort(-tempered, axis=-1, stable=True)
    ranked = jnp.take_along_axis(tempered, order, axis=-1)
    likelihood = jnp.exp(ranked - ranked[:, :1])  # relative to the likeliest
    rank = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 1)
    limit = jnp.where(params.top_k > 0, params.top_k, vocab)[:, None]
    keep = (likelihood >= params.min_p[:, None]) & (rank < limit)
    p = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    unlimited = (params.top_p >= 1.0)[:, None]  # rounding of the sum must not cut the tail
    keep = keep & (unlimited | (before < params.top_p[:, None]))
    keep = keep | (rank == 0)
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)


def _gumbel(seed: UInt32[Array, " 2"], position, vocab: int):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed[0]), seed[1])
    key = jax.random.fold_in(key, position.astype(jnp.uint32))
    return jax.random.gumbel(key, (vocab,), jnp.float32)
