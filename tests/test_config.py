"""K3Config: what files it reads, what it refuses by name, and that every key does something."""

import copy
import dataclasses
import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import K3Config, K3Model
from k3jax import config as config_module
from k3jax.checkpoint import names
from k3jax.checkpoint.tiny import random_model
from k3jax.config import LinearAttentionConfig, QuantizationConfig, VisionConfig
from k3jax.engine.config import EngineConfig
from k3jax.errors import CheckpointError, ConfigError, K3Error
from k3jax.models import k3
from tests.micro import MICRO

GOLDENS = ["k3_text", "k3_sharded", "k3_full_mxfp4", "k3_bf16", "kimi_linear"]
PRESETS = ["k3", "k3-slice-4l", "kimi-linear-48b", "tiny", "tiny-8"]


@pytest.fixture(scope="session")
def raw(golden):
    """A fresh copy of a golden config.json, by name."""
    loaded = {name: json.loads((golden / name / "config.json").read_text()) for name in GOLDENS}
    return lambda name: copy.deepcopy(loaded[name])


@pytest.fixture
def write(tmp_path):
    """Writes a config.json and returns its folder."""

    def written(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return written


# Reading.


@pytest.mark.parametrize("name", GOLDENS)
def test_reads_every_golden(golden, raw, name):
    config = K3Config.from_pretrained(golden / name)
    text = raw(name).get("text_config", raw(name))
    for field in dataclasses.fields(K3Config):
        value = text.get(field.name)
        if isinstance(value, int | float | str):
            assert getattr(config, field.name) == value, field.name
    linear = text["linear_attn_config"]
    assert list(config.linear_attn_config.kda_layers) == linear["kda_layers"]
    assert list(config.linear_attn_config.full_attn_layers) == linear["full_attn_layers"]
    assert config.linear_attn_config.gate_lower_bound == linear.get("gate_lower_bound")
    assert config.dtype == text.get("torch_dtype", text.get("dtype"))
    assert (config.quantization_config is not None) == (name == "k3_full_mxfp4")
    assert (config.vision_config is not None) == (name == "k3_full_mxfp4")
    assert config.is_kimi_linear == (name == "kimi_linear")


def test_kimi_linear_defaults(golden):
    """What a Kimi-Linear file leaves out is off."""
    config = K3Config.from_pretrained(golden / "kimi_linear")
    assert config.attn_res_block_size is None and config.routed_expert_hidden_size is None
    assert config.linear_attn_config.gate_lower_bound is None
    assert not config.linear_attn_config.use_full_rank_gate
    assert (config.hidden_act, config.max_position_embeddings) == ("silu", 4096)
    assert config.q_lora_rank is None and not config.mla_use_output_gate


def test_folder_and_file(golden):
    folder = golden / "k3_text"
    assert K3Config.from_pretrained(folder) == K3Config.from_pretrained(folder / "config.json")
    assert K3Config.from_pretrained(str(folder)) == K3Config.from_pretrained(folder)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_round_trip(golden, name, write):
    config = K3Config.from_pretrained(golden / name)
    assert K3Config.from_dict(config.to_dict()) == config
    assert K3Config.from_pretrained(write(config.to_dict())) == config


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trip(name, write):
    config = K3Config.preset(name)
    assert K3Config.preset(name) == config and hash(K3Config.preset(name)) == hash(config)
    assert K3Config.from_pretrained(write(config.to_dict())) == config


def test_presets_are_what_their_names_say():
    k3_, cut = K3Config.preset("k3"), K3Config.preset("k3-slice-4l")
    assert k3_.layer_types.count("kda") == 69 and k3_.layer_types.count("mla") == 24
    assert k3_.layer_types[-2:] == ("mla", "mla") and not k3_.is_moe_layer(0)
    assert sum(map(k3_.is_moe_layer, range(93))) == 92 and k3_.num_bank_rows(93) == 8
    assert cut.layer_types == k3_.layer_types[:4]
    assert (cut.hidden_size, cut.num_experts) == (k3_.hidden_size, k3_.num_experts)
    assert K3Config.preset("kimi-linear-48b").layer_types.count("mla") == 7
    small = K3Config.preset("tiny")
    assert set(small.layer_types) == {"kda", "mla"} and small.quantization_config is not None
    assert small.vision_config is not None and not small.is_moe_layer(0)
    assert small.num_hidden_layers % small.attn_res_block_size  # the last block is short


def test_tiny_8_divides_by_8():
    config = K3Config.preset("tiny-8")
    linear = config.linear_attn_config
    assert (linear.num_heads, config.num_attention_heads, config.num_experts) == (8, 8, 16)
    assert (config.moe_intermediate_size, config.attn_res_block_size) == (256, 3)
    assert config.num_hidden_layers == 13
    for size in (config.vocab_size, config.hidden_size, config.intermediate_size):
        assert size % 8 == 0


def test_unknown_preset():
    with pytest.raises(ConfigError, match="kimi-k4.*tiny"):
        K3Config.preset("kimi-k4")


def test_flat_and_nested(raw, write):
    nested = raw("k3_text")
    flat = {**nested["text_config"], "architectures": ["KimiK3ForCausalLM"]}
    flat["model_type"] = "kimi_k3"
    flat["media_placeholder_token_id"] = nested["media_placeholder_token_id"]
    assert K3Config.from_pretrained(write(flat)) == K3Config.from_dict(nested)


def test_text_config_alone_reads_as_a_flat_file(raw):
    """Kimi-Linear's spelling with K3's features: features go by keys, names by the spelling."""
    alone = K3Config.from_dict(raw("k3_text")["text_config"])
    nested = K3Config.from_dict(raw("k3_text"))
    assert alone.is_kimi_linear
    assert alone.replace(is_kimi_linear=False, media_placeholder_token_id=157) == nested


@pytest.mark.parametrize("places", [("text",), ("top",), ("text", "top")])
def test_both_places_of_the_quantization(raw, places):
    changed = raw("k3_full_mxfp4")
    found = changed["text_config"].pop("quantization_config")
    if "text" in places:
        changed["text_config"]["quantization_config"] = found
    if "top" in places:
        changed["quantization_config"] = found
    assert K3Config.from_dict(changed) == K3Config.from_dict(raw("k3_full_mxfp4"))


def test_explicit_null_is_the_default(raw):
    changed = raw("k3_text")
    for key in ("hidden_act", "topk_group", "moe_renormalize", "num_key_value_heads"):
        changed["text_config"][key] = None
    assert K3Config.from_dict(changed).hidden_act == "silu"


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_no_situ_beta_means_one(raw, value):
    changed = raw("k3_text")
    changed["text_config"]["activation_situ_beta"] = value
    assert K3Config.from_dict(changed).activation_situ_beta == 1.0


def test_torch_dtype_spellings(raw):
    changed = raw("kimi_linear")
    changed["torch_dtype"] = "torch.bfloat16"
    assert K3Config.from_dict(changed).dtype == "bfloat16"
    del changed["torch_dtype"], changed["dtype"]
    assert K3Config.from_dict(changed).dtype == "bfloat16"


def test_unknown_keys_are_warned_about_once(raw, caplog, monkeypatch):
    monkeypatch.setattr(config_module, "_warned", set())
    changed = raw("k3_text")
    changed["text_config"]["sliding_window"] = 128
    changed["text_config"]["linear_attn_config"]["num_v_heads"] = 8
    with caplog.at_level(logging.WARNING, "k3jax"):
        for _ in range(2):
            K3Config.from_dict(changed)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert any("sliding_window" in message for message in messages)
    assert any("linear_attn_config.num_v_heads" in message for message in messages)


@pytest.mark.parametrize("name", GOLDENS)
def test_published_files_warn_of_nothing(raw, caplog, monkeypatch, name):
    monkeypatch.setattr(config_module, "_warned", set())
    with caplog.at_level(logging.WARNING, "k3jax"):
        K3Config.from_dict(raw(name))
    assert not caplog.records


# Refusals. Each names the key at fault.

TEXT = {  # key of text_config: bad value, what the message names
    "vocab_size": (0, "vocab_size"),
    "hidden_size": (-64, "hidden_size"),
    "intermediate_size": (0, "intermediate_size"),
    "num_hidden_layers": (8, "num_hidden_layers"),
    "num_attention_heads": (0, "num_key_value_heads"),
    "num_key_value_heads": (2, "num_key_value_heads"),
    "q_lora_rank": (0, "q_lora_rank"),
    "kv_lora_rank": (0, "kv_lora_rank"),
    "qk_nope_head_dim": (0, "qk_nope_head_dim"),
    "qk_rope_head_dim": (0, "qk_rope_head_dim"),
    "v_head_dim": (-1, "v_head_dim"),
    "mla_use_nope": (False, "mla_use_nope"),
    "hidden_act": ("gelu", "hidden_act"),
    "activation_situ_beta": (-1.0, "activation_situ_beta"),
    "activation_situ_linear_beta": (0.0, "activation_situ_linear_beta"),
    "rms_norm_eps": (0.0, "rms_norm_eps"),
    "mla_lora_norm_eps": (-1e-6, "mla_lora_norm_eps"),
    "initializer_range": (0.0, "initializer_range"),
    "max_position_embeddings": (0, "max_position_embeddings"),
    "model_max_length": (1, "model_max_length"),
    "attn_res_block_size": (0, "attn_res_block_size"),
    "num_experts": (3, "num_experts_per_token"),
    "num_experts_per_token": (17, "num_experts_per_token"),
    "num_shared_experts": (-1, "num_shared_experts"),
    "moe_intermediate_size": (0, "moe_intermediate_size"),
    "moe_router_activation_func": ("tanh", "moe_router_activation_func"),
    "num_expert_group": (3, "num_expert_group"),
    "topk_group": (2, "topk_group"),
    "topk_method": ("greedy", "topk_method"),
    "first_k_dense_replace": (-1, "first_k_dense_replace"),
    "moe_layer_freq": (0, "moe_layer_freq"),
    "num_nextn_predict_layers": (-1, "num_nextn_predict_layers"),
    "torch_dtype": ("float64", "float64"),
    "dtype": ("bfloat16", "dtype"),
    "media_placeholder_token_id": (158, "media_placeholder_token_id"),
    # Types.
    "routed_scaling_factor": (float("nan"), "routed_scaling_factor"),
    "logit_scale": (float("inf"), "logit_scale"),
    "moe_renormalize": (1, "moe_renormalize"),
    "tie_word_embeddings": ("false", "tie_word_embeddings"),
    "use_grouped_topk": (0, "use_grouped_topk"),
    "latent_moe_use_norm": ("yes", "latent_moe_use_norm"),
    "mla_use_output_gate": (None, None),
    "linear_attn_config": ([1], "linear_attn_config"),
    "quantization_config": ([1], "quantization_config"),
}


@pytest.mark.parametrize("key", TEXT)
def test_refused_text_values(raw, write, key):
    value, named = TEXT[key]
    changed = raw("k3_text")
    changed["text_config"][key] = value
    if named is None:  # null where it means the default
        K3Config.from_dict(changed)
        return
    with pytest.raises(ConfigError, match=named) as caught:
        K3Config.from_pretrained(write(changed))
    assert "config.json" in str(caught.value)


LINEAR = {
    "num_heads": 0,
    "head_dim": 0,
    "short_conv_kernel_size": 1,
    "gate_lower_bound": -5.5,  # 16 rows of exp(-5.5) leave float32's range
    "use_full_rank_gate": "true",
    "kda_layers": [1, 2, 3, 5, 6],
    "full_attn_layers": [4, 8, 9, 9],
}


@pytest.mark.parametrize("key", LINEAR)
def test_refused_linear_attention_values(raw, key):
    changed = raw("k3_text")
    changed["text_config"]["linear_attn_config"][key] = LINEAR[key]
    with pytest.raises(ConfigError, match=f"linear_attn_config.*{key}"):
        K3Config.from_dict(changed)


@pytest.mark.parametrize("value", [[1, "2", 3, 5, 6, 7], [1.0, 2, 3, 5, 6, 7], "1,2,3", [[1]]])
def test_layer_lists_hold_integers(raw, value):
    changed = raw("k3_text")
    changed["text_config"]["linear_attn_config"]["kda_layers"] = value
    with pytest.raises(ConfigError, match="kda_layers"):
        K3Config.from_dict(changed)


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.001])
def test_gate_bound_of_the_safe_chunk_form(bound):
    linear = dataclasses.replace(MICRO.linear_attn_config, gate_lower_bound=bound)
    with pytest.raises(ConfigError, match="gate_lower_bound"):
        MICRO.replace(linear_attn_config=linear)


def without(key, *path):
    def change(content):
        for part in path:
            content = content[part]
        del content[key]

    return change


def with_value(value, key, *path):
    def change(content):
        for part in path:
            content = content[part]
        content[key] = value

    return change


WEIGHTS = ("text_config", "quantization_config", "config_groups", "group_0")
OTHER = {  # change of k3_full_mxfp4, what the message names
    "no_linear_attn_config": (without("linear_attn_config", "text_config"), "linear_attn_config"),
    "no_kda_layers": (
        without("kda_layers", "text_config", "linear_attn_config"),
        "linear_attn_config.kda_layers",
    ),
    "no_vocab_size": (without("vocab_size", "text_config"), "vocab_size"),
    "no_latent_norm": (without("latent_moe_use_norm", "text_config"), "latent_moe_use_norm"),
    "norm_of_no_latent": (
        with_value(None, "routed_expert_hidden_size", "text_config"),
        "latent_moe_use_norm",
    ),
    "two_values": (with_value(True, "tie_word_embeddings"), "tie_word_embeddings"),
    "two_quantizations": (
        with_value({"format": "nvfp4"}, "quantization_config"),
        "quantization_config",
    ),
    "experts_without_experts": (with_value(0, "num_experts", "text_config"), "num_experts"),
    "other_format": (
        with_value("nvfp4-pack-quantized", "format", "text_config", "quantization_config"),
        "nvfp4",
    ),
    "eight_bits": (with_value(8, "num_bits", *WEIGHTS, "weights"), "num_bits"),
    "group_of_16": (with_value(16, "group_size", *WEIGHTS, "weights"), "group_size"),
    "quantized_activations": (
        with_value({"num_bits": 8}, "input_activations", *WEIGHTS),
        "input_activations",
    ),
    "groups_are_a_list": (
        with_value([1], "config_groups", "text_config", "quantization_config"),
        "config_groups",
    ),
    "ignore_is_a_number": (with_value(3, "ignore", "text_config", "quantization_config"), "ignore"),
    "expert_width": (with_value(80, "moe_intermediate_size", "text_config"), "80"),
    "latent_width": (with_value(80, "routed_expert_hidden_size", "text_config"), "80"),
    "vision_width": (with_value(63, "text_hidden_size", "vision_config"), "text_hidden_size"),
    "no_vision_width": (without("vt_hidden_size", "vision_config"), "vision_config.vt_hidden_size"),
    "vision_is_a_list": (with_value([1], "vision_config"), "vision_config"),
    "text_is_a_list": (with_value([1], "text_config"), "text_config"),
    "architectures_is_text": (with_value("KimiK3ForCausalLM", "architectures"), "architectures"),
}


@pytest.mark.parametrize("case", OTHER)
def test_refused_combinations(raw, write, case):
    change, named = OTHER[case]
    changed = raw("k3_full_mxfp4")
    change(changed)
    with pytest.raises(ConfigError, match=named):
        K3Config.from_pretrained(write(changed))


GROUPS = {
    "more_groups_than_there_are": ({"topk_group": 5}, "topk_group"),
    "too_few_experts_in_the_kept_groups": (
        {"topk_group": 1, "num_experts_per_token": 7},
        "num_experts_per_token",
    ),
    "groups_of_one": ({"num_expert_group": 24, "topk_group": 12}, "two experts"),
    "group_size_of_the_type": (
        {
            "quantization_config": QuantizationConfig(group_size=16),
            "moe_intermediate_size": 32,
            "routed_expert_hidden_size": 32,
        },
        "group_size",
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_refused_groups(golden, case):
    changes, named = GROUPS[case]
    with pytest.raises(ConfigError, match=named):
        K3Config.from_pretrained(golden / "k3_sharded").replace(**changes)


FILES = {
    "broken_json": ('{"model_type": "kimi_k3",', "cannot be read"),
    "deep_json": ("[" * 100_000, "cannot be read"),
    "not_an_object": ("[]", "no JSON object"),
    "empty": ("", "cannot be read"),
    "other_model_type": ({"model_type": "llama"}, "unknown architecture.*llama"),
    "no_model_type": ({"architectures": ["KimiK3ForCausalLM"]}, "unknown architecture"),
    "model_type_is_a_list": ({"model_type": ["kimi_k3"]}, "unknown architecture"),
    "other_architecture": (
        {"model_type": "kimi_k3", "architectures": ["DeepseekV3ForCausalLM"]},
        "unknown architecture.*DeepseekV3",
    ),
    "other_inner_architecture": (
        {"model_type": "kimi_k3", "text_config": {"architectures": ["LlamaForCausalLM"]}},
        "unknown architecture.*Llama",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_refused_files(write, case):
    content, message = FILES[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        K3Config.from_pretrained(write(content))
    assert caught.value.file.endswith("config.json")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        K3Config.from_pretrained(tmp_path)


def test_absent_file(tmp_path):
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"no config.json"):
            K3Config.from_pretrained(path)


# Every key does something.

LINEAR_MICRO = MICRO.linear_attn_config
# One MLA layer with experts. The norm of the routed sum would hide every key that only scales it.
ONE_LAYER = MICRO.replace(
    num_hidden_layers=1,
    first_k_dense_replace=0,
    latent_moe_use_norm=False,
    linear_attn_config=dataclasses.replace(LINEAR_MICRO, kda_layers=(), full_attn_layers=(1,)),
)


def linear(**changes):
    return {"linear_attn_config": dataclasses.replace(LINEAR_MICRO, **changes)}


LAYOUT = {  # field: changes of MICRO after which some parameter has another name, shape or dtype
    "vocab_size": {"vocab_size": 66},
    "hidden_size": {"hidden_size": 48},
    "intermediate_size": {"intermediate_size": 64},
    "num_hidden_layers": {"num_hidden_layers": 3, **linear(kda_layers=(1, 3))},
    "num_attention_heads": {"num_attention_heads": 3},
    "kv_lora_rank": {"kv_lora_rank": 20},
    "qk_nope_head_dim": {"qk_nope_head_dim": 16},
    "qk_rope_head_dim": {"qk_rope_head_dim": 8},
    "v_head_dim": {"v_head_dim": 16},
    "q_lora_rank": {"q_lora_rank": None},
    "mla_use_output_gate": {"mla_use_output_gate": False},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "num_experts": {"num_experts": 16},
    "num_shared_experts": {"num_shared_experts": 1},
    "moe_intermediate_size": {"moe_intermediate_size": 32},
    "routed_expert_hidden_size": {"routed_expert_hidden_size": 64},
    "latent_moe_use_norm": {"latent_moe_use_norm": False},
    "first_k_dense_replace": {"first_k_dense_replace": 2},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "attn_res_block_size": {"attn_res_block_size": None},
    "dtype": {"dtype": "bfloat16"},
    "quantization_config": {"quantization_config": None},
    "linear_attn_config": linear(full_attn_layers=(1, 2), kda_layers=()),
    "linear_attn_config.num_heads": linear(num_heads=2),
    "linear_attn_config.head_dim": linear(head_dim=16),
    "linear_attn_config.kda_layers": linear(full_attn_layers=(), kda_layers=(1, 2)),
    "linear_attn_config.full_attn_layers": linear(full_attn_layers=(1, 2), kda_layers=()),
    "linear_attn_config.short_conv_kernel_size": linear(short_conv_kernel_size=3),
    "linear_attn_config.use_full_rank_gate": linear(use_full_rank_gate=False),
}
LOGITS = {  # field: changes of ONE_LAYER (or MICRO) after which the same weights say something else
    "hidden_act": {"hidden_act": "silu"},
    "activation_situ_beta": {"activation_situ_beta": 2.0},
    "activation_situ_linear_beta": {"activation_situ_linear_beta": 1.0},
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "mla_lora_norm_eps": {"mla_lora_norm_eps": 1e-2},
    "logit_scale": {"logit_scale": 0.5},
    "num_experts_per_token": {"num_experts_per_token": 3},
    "moe_router_activation_func": {"moe_router_activation_func": "softmax"},
    "moe_renormalize": {"moe_renormalize": False},
    "routed_scaling_factor": {"routed_scaling_factor": 2.5},
    "use_grouped_topk": {"use_grouped_topk": False},
    "num_expert_group": {"num_expert_group": 4, "num_experts_per_token": 2},
    "topk_group": {"topk_group": 2},
}
LOGITS_OF_TWO_LAYERS = {
    "attn_res_block_size to 2": {"attn_res_block_size": 2},
    "linear_attn_config.gate_lower_bound": linear(gate_lower_bound=-2.0),
    "linear_attn_config.gate_lower_bound to null": linear(gate_lower_bound=None),
}
ALL_LOGITS = {name: (ONE_LAYER, changes) for name, changes in LOGITS.items()} | {
    name: (MICRO, changes) for name, changes in LOGITS_OF_TWO_LAYERS.items()
}
REFUSED = {  # fields with one legal value
    "mla_use_nope": {"mla_use_nope": False},
    "topk_method": {"topk_method": "greedy"},
    "quantization_config.group_size": {"quantization_config": QuantizationConfig(group_size=64)},
}
ELSEWHERE = {  # fields whose effect is neither in the layout nor in the logits; tested below
    "initializer_range",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "is_kimi_linear",
    "quantization_config.ignore",
}
# The text model ignores these; they are kept for the parts that will read images.
VISION = {"vision_config", "media_placeholder_token_id"}


def test_every_field_is_known_here():
    fields = {field.name for field in dataclasses.fields(K3Config)}
    for name, kind in (
        ("linear_attn_config", LinearAttentionConfig),
        ("quantization_config", QuantizationConfig),
    ):
        fields |= {f"{name}.{field.name}" for field in dataclasses.fields(kind)}
    covered = {name.split(" ")[0] for name in [*LAYOUT, *ALL_LOGITS, *REFUSED]} | ELSEWHERE | VISION
    assert covered == fields


def layout(config: K3Config) -> dict:
    """Name, shape and dtype of every parameter."""
    state = nnx.to_flat_state(nnx.state(K3Model(config), nnx.Param))
    return {path: (v.get_value().shape, v.get_value().dtype.name) for path, v in state}


@pytest.mark.parametrize("field", LAYOUT)
def test_field_changes_the_layout(field):
    assert layout(MICRO.replace(**LAYOUT[field])) != layout(MICRO)


@functools.cache
def micro_logits(config: K3Config) -> np.ndarray:
    """Logits of five tokens with the weights of seed 0; compiled fast rather than well."""
    graphdef, state = nnx.split(random_model(config))
    ids, lengths = jnp.arange(5, dtype=jnp.int32)[None], jnp.full((1,), 5, jnp.int32)
    lowered = k3._forward.lower(graphdef, state, ids, lengths, (), None)
    program = lowered.compile({"xla_backend_optimization_level": 0})
    return np.asarray(program(state, ids, lengths)[0])


@pytest.mark.parametrize("field", ALL_LOGITS)
def test_field_changes_the_logits(field):
    base, changes = ALL_LOGITS[field]
    changed = base.replace(**changes)
    assert layout(changed) == layout(base)
    logits, before = micro_logits(changed), micro_logits(base)
    assert np.isfinite(logits).all()
    assert np.abs(logits - before).max() > 1e-4 * np.abs(before).max()


@pytest.mark.parametrize("field", REFUSED)
def test_field_has_one_value(field):
    with pytest.raises(ConfigError, match=field.split(".")[-1]):
        MICRO.replace(**REFUSED[field])


def test_initializer_range_scales_new_weights(monkeypatch):
    scales = set()

    def record(key, *, shape, dtype, init, scale):
        scales.add(scale)
        return np.zeros(shape, dtype)  # compiling a generator for each shape would take long

    monkeypatch.setattr(k3, "initial_value", record)
    K3Model.init(MICRO.replace(initializer_range=0.5))
    assert scales == {0.5}
    monkeypatch.undo()
    kind = {"shape": (99,), "dtype": "float32", "init": "normal"}
    made = k3.initial_value(jax.random.key(0), scale=0.5, **kind)
    assert float(jnp.std(made)) == pytest.approx(0.5, rel=0.2)


def test_max_position_embeddings_limits_generation():
    with pytest.raises(K3Error, match="max_position_embeddings"):
        EngineConfig(max_model_len=101).resolve(on_cpu=True, model_limit=100)


def test_nextn_layers_are_left_out():
    name = "model.layers.2.eh_proj.weight"
    assert not names.skipped(MICRO, name)
    assert names.skipped(MICRO.replace(num_nextn_predict_layers=1), name)
    assert not names.skipped(MICRO.replace(num_nextn_predict_layers=1), name.replace("2", "1", 1))


def test_kimi_linear_spelling():
    config = K3Config.preset("kimi-linear-48b")
    assert config.is_kimi_linear and names.published_prefix(config) == "model."
    assert "text_config" not in config.to_dict() and "model_max_length" in config.to_dict()
    other = config.replace(is_kimi_linear=False)
    assert names.published_prefix(other) == "language_model.model."
    assert "text_config" in other.to_dict()


def test_ignored_patterns_are_written_back():
    config = MICRO.replace(quantization_config=QuantizationConfig(ignore=("re:.*x.*",)))
    assert config.to_dict()["text_config"]["quantization_config"]["ignore"] == ["re:.*x.*"]


def test_vision_settings_are_written_back():
    config = K3Config.preset("tiny")
    raw = config.to_dict()
    fields = {field.name for field in dataclasses.fields(VisionConfig)}
    assert fields <= raw["vision_config"].keys()
    assert raw["media_placeholder_token_id"] == config.media_placeholder_token_id


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MICRO.hidden_size = 1
    assert MICRO.replace(hidden_size=48) is not MICRO and MICRO.hidden_size == 40
    assert jax.tree.leaves(MICRO) == [MICRO]  # static: part of a compiled program's key
