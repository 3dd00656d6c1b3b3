"""Mixture of experts: K3's LatentMoE and Kimi-Linear's plain form.

E experts, k of them for each token, of width F; they read and write Z channels, K3's latent or the
model's own width.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.distributed import collectives
from k3jax.models.layers import MLP, Linear, RMSNorm, dot, gated_activation, parameter
from pallas_kernels.moe_experts import DenseExperts, MXFP4Experts, moe_experts
from pallas_kernels.router import router


class Gate(nnx.Module):
    """The router: scores by `weight`, choice by scores plus a float32 bias."""

    def __init__(self, config: K3Config, dtype):
        self.weight = parameter((config.num_experts, config.hidden_size), (None, None), dtype)
        # Differences between biases can lie below bfloat16's resolution.
        self.e_score_correction_bias = parameter(
            (config.num_experts,), (None,), jnp.float32, init="zeros"
        )


class Experts(nnx.Module):
    """All routed experts of a layer, dense or packed MXFP4 (gate first, then up, on axis 1)."""

    def __init__(self, config: K3Config, dtype):
        count, width, dim = (
            config.num_experts,
            config.moe_intermediate_size,
            config.expert_hidden_size,
        )
        up_axes = ("experts", None, "expert_mlp", None)
        down_axes = ("experts", None, "expert_mlp")
        self.packed = config.quantization_config is not None
        if self.packed:

            def packed(name: str, shape, axes, columns_per_item: int, init: str):
                shape = (*shape[:-1], shape[-1] // columns_per_item)
                setattr(self, name, parameter(shape, axes, jnp.uint8, init=init))

            up, down = (count, 2, width, dim), (count, dim, width)
            packed("gate_up_packed", up, up_axes, 2, "mxfp4_codes")
            packed("gate_up_scale", up, up_axes, 32, "mxfp4_scale")
            packed("down_packed", down, down_axes, 2, "mxfp4_codes")
            packed("down_scale", down, down_axes, 32, "mxfp4_scale")
        else:
            self.gate_up = parameter((count, 2, width, dim), up_axes, dtype)
            self.down = parameter((count, dim, width), down_axes, dtype)

    def weights(self) -> DenseExperts | MXFP4Experts:
        """The weights as the kernels take them."""
        if self.packed:
            return MXFP4Experts(
                self.gate_up_packed[...],
                self.gate_up_scale[...],
                self.down_packed[...],
                self.down_scale[...],
            )
        return DenseExperts(self.gate_up[...], self.down[...])


class LatentMoE(nnx.Module):
    """Routed experts, in a latent with a norm after their full sum (K3), plus shared experts."""

    def __init__(self, config: K3Config, dtype):
        dim, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Gate(config, dtype)
        self.experts = Experts(config, dtype)
        self.has_latent = latent is not None
        self.has_norm = config.latent_moe_use_norm
        if latent is not None:
            self.routed_expert_down_proj = Linear(dim, latent, (None, None), dtype)
            if self.has_norm:
                self.routed_expert_norm = RMSNorm(latent, eps=config.rms_norm_eps, dtype=dtype)
            self.routed_expert_up_proj = Linear(latent, dim, (None, None), dtype)
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            width = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = MLP(config, width, dtype)
        self.activation = gated_activation(config)
        self.top_k = config.num_experts_per_token
        self.num_groups, self.kept_groups = config.router_groups
        self.router_activation = config.moe_router_activation_func
        self.renormalize = config.moe_renormalize
        self.scaling_factor = config.routed_scaling_factor
        self.implementation: str | None = None  # of moe_experts; "ragged" to differentiate

    def __call__(self, x: Float[Array, "T D"], tap) -> Float[Array, "T D"]:
        # The router reads the full width, in float32: near ties flip in less.
        logits = dot(x.astype(jnp.float32), self.gate.weight[...].astype(jnp.float32))
        ids, weights = router(
            logits,
            self.gate.e_score_correction_bias[...],
            top_k=self.top_k,
            num_groups=self.num_groups,
            kept_groups=self.kept_groups,
            activation=self.router_activation,
            renormalize=self.renormalize,
            scaling_factor=self.scaling_factor,
        )
        tap("router", lambda: (ids, weights))
        implementation = self.implementation
        if implementation is None and ids.size > 2 * self.gate.weight.shape[0]:
            implementation = "sorted_loop"  # gathered, most experts would be decoded several times
        z = self.routed_expert_down_proj(x) if self.has_latent else x
        routed = moe_experts(
            z,
            ids,
            weights,
            self.experts.weights(),
            self.activation,
            implementation=implementation,
        )
        # The norm is not linear: partial sums of the devices meet before it.
        routed = collectives.all_reduce(routed, "tp").astype(x.dtype)
        if self.has_latent:
            if self.has_norm:
                routed = self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        return routed + self.shared_experts(x) if self.has_shared else routed
