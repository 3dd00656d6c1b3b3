"""Kimi Delta Attention: a gated delta rule with a decay for every key channel.

H heads, K key and V value channels (equal in every published model), W convolution taps.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.distributed import collectives
from k3jax.models.cache import Batch, DecodeRows, PrefillRows
from k3jax.models.layers import Linear, parameter
from pallas_kernels.common.functions import decay_gate, gated_rms_norm, l2_normalize
from pallas_kernels.common.pools import set_rows
from pallas_kernels.kda_decode import KDACache, KDAWeights, kda_decode
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.short_conv import conv_tails, short_conv


class ShortConv(nnx.Module):
    """Weight of a depthwise convolution, [H, d, W] float32; the last tap is the current token."""

    def __init__(self, num_heads: int, head_dim: int, taps: int):
        self.weight = parameter(
            (num_heads, head_dim, taps), ("heads", None, None), jnp.float32, init="conv"
        )


class HeadNorm(nnx.Module):
    """Weight of the gated RMSNorm over one head's channels, float32, shared by all heads."""

    def __init__(self, dim: int):
        self.weight = parameter((dim,), (None,), jnp.float32, init="ones")


class KDA(nnx.Module):
    """One KDA sublayer (Kimi Linear; K3 bounds the decay and widens the output gate)."""

    def __init__(self, config: K3Config, dtype):
        linear = config.linear_attn_config
        dim, heads, width = config.hidden_size, linear.num_heads, linear.head_dim
        inner = heads * width
        by_head = ("heads", None)
        self.head_dim = width
        self.gate_lower_bound = linear.gate_lower_bound
        self.eps = config.rms_norm_eps
        self.q_proj = Linear(dim, inner, by_head, dtype)
        self.k_proj = Linear(dim, inner, by_head, dtype)
        self.v_proj = Linear(dim, inner, by_head, dtype)
        self.q_conv1d = ShortConv(heads, width, linear.short_conv_kernel_size)
        self.k_conv1d = ShortConv(heads, width, linear.short_conv_kernel_size)
        self.v_conv1d = ShortConv(heads, width, linear.short_conv_kernel_size)
        self.f_a_proj = Linear(dim, width, (None, None), dtype)
        self.f_b_proj = Linear(width, inner, by_head, dtype)
        self.b_proj = Linear(dim, heads, by_head, dtype)
        self.A_log = parameter((heads,), ("heads",), jnp.float32, init="A_log")
        self.dt_bias = parameter((heads, width), by_head, jnp.float32, init="zeros")
        if linear.use_full_rank_gate:
            self.g_proj = Linear(dim, inner, by_head, dtype)
        else:
            self.g_a_proj = Linear(dim, width, (None, None), dtype)
            self.g_b_proj = Linear(width, inner, by_head, dtype)
        self.full_rank_gate = linear.use_full_rank_gate
        self.o_norm = HeadNorm(width)
        self.o_proj = Linear(inner, dim, (None, "heads"), dtype)

    def __call__(
        self, x: Float[Array, "T D"], batch: Batch, cache: KDACache | None, layer: int, tap
    ) -> tuple[Float[Array, "T D"], KDACache | None]:
        """Output and updated cache; `layer` counts KDA layers. Without a cache nothing is kept."""
        weights = self.weights()

        def decode(cache, rows: DecodeRows, q, k, v, f, beta, gate):
            assert cache is not None, "a decode step continues a cache"
            return kda_decode(
                q,
                k,
                v,
                f,
                beta,
                gate,
                weights,
                cache,
                layer,
                None if rows.slots is None else jnp.where(rows.active, rows.slots, 0),
                gate_lower_bound=self.gate_lower_bound,
                eps=self.eps,
            )

        def prefill(cache, rows: PrefillRows, *raw):
            return self._prefill(raw, weights, rows, cache, layer, tap)

        out, cache = batch.each(cache, self._project(x), decode, prefill)
        y = self.o_proj(out.reshape(x.shape[0], -1))
        return collectives.all_reduce(y, "tp"), cache

    def weights(self) -> KDAWeights:
        """The weights between the projections, as the kernels take them."""
        return KDAWeights(
            self.q_conv1d.weight[...],
            self.k_conv1d.weight[...],
            self.v_conv1d.weight[...],
            self.A_log[...],
            self.dt_bias[...],
            self.o_norm.weight[...],
        )

    def _project(self, x):
        """Raw q, k, v, f [T, H, d], beta [T, H] and gate [T, H, V]."""

        def heads(y):
            return y.reshape(x.shape[0], -1, self.head_dim)

        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return (
            heads(self.q_proj(x)),
            heads(self.k_proj(x)),
            heads(self.v_proj(x)),
            heads(self.f_b_proj(self.f_a_proj(x))),
            self.b_proj(x),
            heads(gate),
        )

    def _prefill(
        self, raw, weights: KDAWeights, rows: PrefillRows, cache: KDACache | None, layer: int, tap
    ):
        q, k, v, f, beta, gate = raw
        segments = rows.segments
        past = self._past(q, weights, rows, cache, layer)

        # q, k and v as heads of one convolution.
        q, k, v = jnp.split(
            short_conv(
                jnp.concatenate([q, k, v], axis=1),
                jnp.concatenate([weights.conv_q, weights.conv_k, weights.conv_v], axis=0),
                jnp.concatenate([past.conv_q, past.conv_k, past.conv_v], axis=2),
                segments,
            ),
            3,
            axis=1,
        )
        checkpoints = rows.checkpoints
        wanted = None if checkpoints is None else (checkpoints.sequence, checkpoints.length)
        o, state, snapshots = kda_prefill(
            l2_normalize(q).astype(v.dtype),  # the chunked kernels of the reference round here
            l2_normalize(k).astype(v.dtype),
            v,
            decay_gate(f, weights.A_log, weights.dt_bias, self.gate_lower_bound),
            jax.nn.sigmoid(beta.astype(jnp.float32)),
            past.state,
            segments,
            phase=None if rows.aligned else rows.context_lens,
            checkpoints=wanted,
        )
        sequences = jnp.arange(segments.lens.shape[0], dtype=jnp.int32)

        def tails(sequence, length):
            pairs = zip(raw[:3], (past.conv_q, past.conv_k, past.conv_v), strict=True)
            return [conv_tails(y, tail, segments, sequence, length) for y, tail in pairs]

        after = KDACache(state, *tails(sequences, segments.lens))
        tap("kda_state", lambda: _all_heads(after), per_token=False)
        if cache is not None:
            slots = rows.slots
            if slots is not None:
                slots = jnp.where(segments.lens > 0, slots, 0)
            cache = _write(cache, after, layer, slots)
            if checkpoints is not None:
                taken = KDACache(snapshots, *tails(checkpoints.sequence, checkpoints.length))
                cache = _write(cache, taken, layer, checkpoints.slot)
        return gated_rms_norm(o, gate, weights.o_norm, self.eps), cache

    def _past(self, q, weights: KDAWeights, rows: PrefillRows, cache: KDACache | None, layer: int):
        """Memory before this call, [B, ...] each: zeros for a sequence that starts here, whatever
        its slot held before."""
        count = rows.segments.lens.shape[0]
        heads, width, taps = weights.conv_q.shape
        if cache is None or rows.context_lens is None:
            tail = jnp.zeros((count, taps - 1, heads, width), q.dtype)
            return KDACache(jnp.zeros((count, heads, width, width), jnp.float32), tail, tail, tail)
        started = rows.context_lens > 0

        def read(pool):
            found = pool[layer] if rows.slots is None else pool[layer, rows.slots]
            mask = jnp.expand_dims(started, tuple(range(1, found.ndim)))
            return jnp.where(mask, found, jnp.zeros((), found.dtype))

        return jax.tree.map(read, cache)


def _write(cache: KDACache, rows: KDACache, layer: int, slots) -> KDACache:
    """The cache with those rows in those slots of a layer (None: row b in slot b)."""
    index = (layer,) if slots is None else (layer, slots)
    return jax.tree.map(lambda pool, value: set_rows(pool, index, value), cache, rows)


def _all_heads(x: KDACache) -> KDACache:
    """Memory rows with the heads of all devices."""
    tails = (x.conv_q, x.conv_k, x.conv_v)
    return KDACache(
        collectives.all_gather(x.state, "tp", dim=1),
        *(collectives.all_gather(tail, "tp", dim=2) for tail in tails),
    )
