"""The smallest model with every part of the text architecture: for tests that compile a lot."""

import dataclasses

from k3jax.config import K3Config, LinearAttentionConfig, QuantizationConfig

# Layer 0 is KDA with a dense MLP, layer 1 MLA with packed experts in two groups. Sizes differ from
# each other where they may, and divide by 2 where tensor parallelism splits them.
MICRO = K3Config(
    vocab_size=64,
    hidden_size=40,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=4,
    v_head_dim=14,
    linear_attn_config=LinearAttentionConfig(
        num_heads=4,
        head_dim=8,
        kda_layers=(1,),
        full_attn_layers=(2,),
        use_full_rank_gate=True,
        gate_lower_bound=-5.0,
    ),
    mla_use_output_gate=True,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    attn_res_block_size=1,
    num_experts=8,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=32,
    latent_moe_use_norm=True,
    num_expert_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    dtype="float32",
    quantization_config=QuantizationConfig(),
)

# The same with the parts of Kimi-Linear: plain residuals, plain experts, softplus decay.
MICRO_KIMI_LINEAR = MICRO.replace(
    is_kimi_linear=True,
    linear_attn_config=dataclasses.replace(
        MICRO.linear_attn_config, use_full_rank_gate=False, gate_lower_bound=None
    ),
    q_lora_rank=None,
    mla_use_output_gate=False,
    hidden_act="silu",
    attn_res_block_size=None,
    routed_expert_hidden_size=None,
    latent_moe_use_norm=False,
    num_expert_group=1,
    quantization_config=None,
    dtype="bfloat16",
)
