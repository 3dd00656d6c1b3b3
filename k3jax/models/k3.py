"""The Kimi K3 text model, and Kimi-Linear, which is the same without some of its parts."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.distributed import collectives
from k3jax.distributed.sharding import check_divisible, named_sharding, on_mesh, state_specs
from k3jax.errors import ConfigError, RequestError
from k3jax.models.attn_res import AttnRes
from k3jax.models.cache import Batch, K3Cache, PrefillRows
from k3jax.models.kda import KDA
from k3jax.models.layers import MLP, Embedding, Linear, RMSNorm, dot, initial_value
from k3jax.models.mla import MLA
from k3jax.models.moe import LatentMoE
from pallas_kernels.common.segments import Segments

CAPTURES = (
    "prefix_sum",
    "block_residuals",
    "attn_res_weights",
    "router",
    "kda_state",
    "mla_latent",
    "attn_out",
    "mlp_out",
    "final_norm",
)


class DecoderLayer(nnx.Module):
    """A token mixer (KDA or MLA) and an MLP (dense or MoE), each behind an AttnRes mix and norm."""

    def __init__(self, config: K3Config, index: int, dtype):
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.layer_type = config.layer_types[index]
        # Which of the KDA layers, or of the MLA layers, this is: its place in the cache.
        self.cache_index = config.layer_types[:index].count(self.layer_type)
        block = config.attn_res_block_size
        self.num_bank_rows = config.num_bank_rows(index)
        self.opens_block = block is not None and index % block == 0
        if block is not None:
            self.self_attention_res = AttnRes(dim, eps=eps, dtype=dtype)
            self.mlp_res = AttnRes(dim, eps=eps, dtype=dtype)
        self.input_layernorm = RMSNorm(dim, eps=eps, dtype=dtype)
        self.self_attn = KDA(config, dtype) if self.layer_type == "kda" else MLA(config, dtype)
        self.post_attention_layernorm = RMSNorm(dim, eps=eps, dtype=dtype)
        self.is_moe = config.is_moe_layer(index)
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config, dtype)
        else:
            self.mlp = MLP(config, config.intermediate_size, dtype)

    def __call__(
        self,
        bank: Float[Array, "N T D"] | None,
        prefix: Float[Array, "T D"],
        batch: Batch,
        cache: K3Cache | None,
        tap,
    ) -> tuple[Float[Array, "N T D"] | None, Float[Array, "T D"], K3Cache | None]:
        """The bank of closed blocks, the sum of the open one, and the cache, one layer on."""
        rows = self.num_bank_rows
        x = self._mix("self_attention_res", bank, rows, prefix, tap)
        if self.opens_block:
            assert bank is not None
            bank = bank.at[rows].set(prefix)  # the sum as it was before this layer
            rows += 1
        out, cache = self._attend(self.input_layernorm(x), batch, cache, tap)
        tap("attn_out", lambda: out)
        prefix = out if self.opens_block else prefix + out
        x = self._mix("mlp_res", bank, rows, prefix, tap)
        x = self.post_attention_layernorm(x)
        out = self.block_sparse_moe(x, tap) if self.is_moe else self.mlp(x)
        tap("mlp_out", lambda: out)
        prefix = prefix + out
        tap("prefix_sum", lambda: prefix)
        return bank, prefix, cache

    def _mix(self, name: str, bank, rows: int, prefix, tap):
        """The sublayer's input; in the first layer the embedding is the only source."""
        if bank is None or rows == 0:
            return prefix
        mix, weights = getattr(self, name)(bank[:rows], prefix)
        tap("attn_res_weights", lambda: weights, suffix=name)
        return mix

    def _attend(self, x, batch: Batch, cache: K3Cache | None, tap):
        memory = getattr(cache, self.layer_type, None)
        out, memory = self.self_attn(x, batch, memory, self.cache_index, tap)
        if cache is None:
            return out, None
        changed: dict[str, Any] = {self.layer_type: memory}
        return out, dataclasses.replace(cache, **changed)


class K3Model(nnx.Module):
    """The text model. Calling it gives logits of whole sequences; `step` advances a cache.

    `K3Model(config)` lays the model out without values; `init` and `from_pretrained` fill it.
    """

    def __init__(self, config: K3Config, *, dtype=None, mesh: jax.sharding.Mesh | None = None):
        check_divisible(config, mesh)
        self.config = config
        self.mesh = mesh
        self.dtype = _model_dtype(dtype, config)
        dim, eps, dtype = config.hidden_size, config.rms_norm_eps, self.dtype
        self.embed_tokens = Embedding(config.vocab_size, dim, dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype) for i in range(config.num_hidden_layers)]
        )
        if config.attn_res_block_size is not None:
            self.output_attn_res = AttnRes(dim, eps=eps, dtype=dtype)
        self.norm = RMSNorm(dim, eps=eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(dim, config.vocab_size, ("vocab", None), dtype)

    @classmethod
    def init(cls, config: K3Config, *, seed: int = 0, dtype=None, mesh=None) -> "K3Model":
        """A model with random weights made on the device, to train or to measure."""
        model = cls(config, dtype=dtype, mesh=mesh)
        key = jax.random.key(seed)
        graphdef, state = nnx.split(model)
        for number, (_, variable) in enumerate(nnx.to_flat_state(state)):
            meta = variable.get_metadata()
            value = initial_value(
                jax.random.fold_in(key, number),
                shape=variable.get_value().shape,
                dtype=variable.get_value().dtype,
                init=meta["init"],
                scale=config.initializer_range,
            )
            variable.set_value(jax.device_put(value, named_sharding(mesh, meta["logical_axes"])))
        return nnx.merge(graphdef, state)

    @classmethod
    def from_pretrained(cls, path, *, dtype=None, mesh=None) -> "K3Model":
        """Loads a Hugging Face or Orbax folder, each tensor straight into its place on the mesh.

        dtype: "float32", "bfloat16" or a jnp dtype; by default the checkpoint's own. Weights that
        the model always keeps in float32, and packed experts, are not affected.
        """
        from k3jax.checkpoint import load_model

        return load_model(path, dtype=dtype, mesh=mesh)

    def save_pretrained(self, path) -> None:
        """Writes config.json and safetensors in the published layout."""
        from k3jax.checkpoint import save_model

        save_model(self, path)

    def __call__(
        self,
        input_ids,
        lengths=None,
        capture: Sequence[str] = (),
    ):
        """Float32 logits [B, T, vocab] of token ids, int [B, T], right-padded where `lengths` [B]
        says so. Unusable ids and lengths are a `RequestError`.

        With `capture`, (logits, captured): for each name a dictionary by layer (0-based), with
        token axes as [B, T, …]. "block_residuals" [B, T, rows, D] and "final_norm" are single
        arrays, and "attn_res_weights" has a key for each mix ("layers.3.mlp_res",
        "output_attn_res"). "router" holds (expert ids, weights), "kda_state" the KDA memory after
        each sequence. Logits and captures past a row's length mean nothing.
        """
        capture = (capture,) if isinstance(capture, str) else tuple(capture)
        unknown = set(capture) - set(CAPTURES)
        if unknown:
            raise ConfigError(f"cannot capture {sorted(unknown)}; there are {CAPTURES}")
        ids, lens = checked_prompts(input_ids, lengths, self.config.vocab_size)
        graphdef, state = self.split()
        logits, captured = _forward(graphdef, state, ids, lens, capture, self.mesh)
        return (logits, captured) if capture else logits

    def split(self) -> tuple[nnx.GraphDef, nnx.State]:
        """Graph definition and weights, as step programs take them; refuses one without values."""
        graphdef, state = nnx.split(self)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            raise ConfigError("the model has no weights: use K3Model.init or from_pretrained")
        return graphdef, state

    def step(
        self,
        tokens: Int[Array, " T"],
        batch: Batch,
        cache: K3Cache | None,
        tap: Callable | None = None,
    ) -> tuple[Float[Array, "T D"], K3Cache | None]:
        """Final normed hidden states of the batch's new tokens, and the cache with them in it.

        Runs on local shards: call it inside the step's shard_map, or without a mesh.
        """
        tap = tap or _no_tap
        prefix = self.embed_tokens(tokens)
        bank = None
        if self.config.attn_res_block_size is not None:
            rows = self.config.num_bank_rows(self.config.num_hidden_layers)
            bank = jnp.zeros((rows, *prefix.shape), prefix.dtype)
        for layer in self.layers:
            here = functools.partial(tap, layer=layer.index)
            bank, prefix, cache = layer(bank, prefix, batch, cache, here)
        if bank is not None:
            tap("block_residuals", lambda: jnp.moveaxis(bank, 0, 1), layer=None)
            prefix, weights = self.output_attn_res(bank, prefix)
            tap("attn_res_weights", lambda: weights, layer=None, suffix="output_attn_res")
        hidden = self.norm(prefix)
        tap("final_norm", lambda: hidden, layer=None)
        return hidden, cache

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Float32 logits over the whole vocabulary."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        local = dot(hidden, head.weight[...], out_dtype=jnp.float32)
        logits = collectives.all_gather(local, "tp", dim=1)
        return logits * self.config.logit_scale if self.config.logit_scale != 1.0 else logits

    @property
    def num_parameters(self) -> int:
        """Logical weights; a packed byte holds two."""
        return sum(
            variable.get_value().size * (2 if path[-1].endswith("_packed") else 1)
            for path, variable in nnx.to_flat_state(nnx.state(self, nnx.Param))
            if not path[-1].endswith("_scale")
        )


def checked_prompts(input_ids, lengths, vocab_size: int):
    """Token ids [B, T] and lengths [B] (None: T each) as int32; a `RequestError` names the field.

    Inside a traced function values are not known, and only shapes are checked.
    """
    traced = isinstance(input_ids, jax.core.Tracer)
    try:
        ids = input_ids if traced else np.asarray(input_ids)
    except ValueError:
        raise RequestError(
            "input_ids must be rectangular: pad and say lengths=", field="input_ids"
        ) from None
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"input_ids must be integers [batch, tokens], not empty; got shape {ids.shape}",
            field="input_ids",
        )
    if not traced and (ids.min() < 0 or ids.max() >= vocab_size):
        raise RequestError(f"input_ids must be in 0..{vocab_size - 1}", field="input_ids")
    batch, width = ids.shape
    if isinstance(lengths, jax.core.Tracer):
        return ids.astype(jnp.int32), lengths.astype(jnp.int32)
    lens = np.full(batch, width) if lengths is None else np.asarray(lengths)
    whole = lens.dtype.kind in "iu" and lens.shape == (batch,)
    if not whole or lens.min() < 1 or lens.max() > width:
        raise RequestError(f"lengths must be {batch} integers in 1..{width}", field="lengths")
    return ids.astype(np.int32), lens.astype(np.int32)


def _model_dtype(wanted, config: K3Config) -> jnp.dtype:
    if wanted is None:
        # KDA leaves float16's range, and bfloat16 would round float16 values: hold them exactly.
        wanted = "float32" if config.dtype == "float16" else config.dtype
    with contextlib.suppress(TypeError):
        if (dtype := jnp.dtype(wanted)) in (jnp.float32, jnp.bfloat16):
            return dtype
    raise ConfigError(f"dtype={wanted!r} must be float32 or bfloat16")


def _no_tap(name: str, value: Callable, **where) -> None:
    """Records nothing; `value` is not even computed."""


class _Taps:
    """Collects the intermediates that a caller asked for."""

    def __init__(self, names: tuple[str, ...], batch: int):
        self.values: dict[str, dict] = {name: {} for name in names}
        self.batch = batch

    def __call__(self, name: str, value: Callable, *, layer, per_token=True, suffix=None) -> None:
        if name not in self.values:
            return
        found = value()
        if per_token:
            found = jax.tree.map(lambda x: x.reshape(self.batch, -1, *x.shape[1:]), found)
        if suffix is not None:
            self.values[name][suffix if layer is None else f"layers.{layer}.{suffix}"] = found
        elif layer is not None:
            self.values[name][layer] = found
        else:
            self.values[name] = found


@functools.partial(jax.jit, static_argnames=("graphdef", "capture", "mesh"))
def _forward(graphdef, state, input_ids, lengths, capture: tuple[str, ...], mesh):
    count, width = input_ids.shape

    def forward(state, input_ids, lengths):
        model = nnx.merge(graphdef, state)
        taps = _Taps(capture, count)
        segments = Segments.rectangle(count, width, lengths)
        batch = Batch(prefill=PrefillRows(segments))
        hidden, _ = model.step(input_ids.reshape(-1), batch, None, taps)
        return model.logits(hidden).reshape(count, width, -1), taps.values

    everywhere = PartitionSpec()
    specs = (state_specs(state), everywhere, everywhere)
    return on_mesh(mesh, forward, specs, everywhere)(state, input_ids, lengths)
