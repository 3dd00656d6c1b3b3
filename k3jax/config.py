"""Model configuration: `config.json` of Kimi K3 and Kimi-Linear checkpoints as frozen dataclasses.

Keys keep the checkpoint's spelling, so that reading a file renames nothing. A key that changes the
model is a field here; a key known to change nothing is listed in `_INERT`; any other key is warned
about once. Settings that contradict each other raise `ConfigError` and name the key.
"""

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3jax.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_ARCHITECTURES = {
    "KimiK3ForConditionalGeneration",
    "KimiK3ForCausalLM",
    "KimiLinearForCausalLM",
}
_MODEL_TYPES = {"kimi_k3", "kimi_linear"}
_DTYPES = {"float32", "bfloat16", "float16"}

# Known keys that change nothing in the text model: no position is ever rotated (rope_*, head_dim),
# token ids come from the tokenizer's files, and the rest steers other programs.
_INERT = {
    "architectures",
    "model_type",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "ignore_index",
    "image_placeholder",
    "transformers_version",
    "auto_map",
    "_name_or_path",
}
_warned: set[str] = set()


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The `linear_attn_config` block: KDA sizes and which layers use which attention (1-based)."""

    num_heads: int
    head_dim: int
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = False  # output gate g_proj (K3) instead of g_a_proj, g_b_proj
    gate_lower_bound: float | None = (
        None  # None: -exp(A_log) * softplus(.), else bound * sigmoid(.)
    )


@dataclass(frozen=True)
class VisionConfig:
    """The `vision_config` block: MoonViT3d and its projector."""

    vt_hidden_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    vt_intermediate_size: int
    qkv_hidden_size: int
    text_hidden_size: int
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    merge_kernel_size: tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = 1024
    projector_ln_eps: float = 1e-5
    norm_type: str = "rmsnorm"
    norm_eps: float = 2.0**-7  # the release names no eps; torch's machine eps in bfloat16


@dataclass(frozen=True)
class QuantizationConfig:
    """The `quantization_config` block; only weight-only MXFP4 experts exist."""

    group_size: int = 32
    ignore: tuple[str, ...] = (
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
        "re:.*routed_expert_.*",
        "re:.*gate.*",
    )


@dataclass(frozen=True)
class K3Config:
    """Everything that shapes the model. Sizes in elements; layer lists 1-based as in the files."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: LinearAttentionConfig
    q_lora_rank: int | None = None
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    hidden_act: str = "silu"
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    mla_lora_norm_eps: float = 1e-6  # q_a_layernorm, kv_a_layernorm: public sources disagree
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    logit_scale: float = 1.0
    attn_res_block_size: int | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    dtype: str = "bfloat16"
    quantization_config: QuantizationConfig | None = None
    vision_config: VisionConfig | None = None
    media_placeholder_token_id: int | None = None
    is_kimi_linear: bool = False  # flat file, `model.` prefix, `model_max_length`

    def __post_init__(self):
        _validate(self)

    # Derived facts that several modules need.

    @property
    def expert_hidden_size(self) -> int:
        """Width that the routed experts read and write: the latent, or the model's own."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def router_groups(self) -> tuple[int, int]:
        """(number of expert groups, groups kept); (1, 1) when grouping is off."""
        return (self.num_expert_group, self.topk_group) if self.use_grouped_topk else (1, 1)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """ "kda" or "mla" for each layer, 0-based."""
        full = set(self.linear_attn_config.full_attn_layers)
        return tuple("mla" if i + 1 in full else "kda" for i in range(self.num_hidden_layers))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts rather than a dense MLP."""
        return (
            self.num_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def num_bank_rows(self, layer: int) -> int:
        """AttnRes bank rows before `layer` (0-based) runs; with `num_hidden_layers`, at the end."""
        return 0 if self.attn_res_block_size is None else -(-layer // self.attn_res_block_size)

    # Construction.

    @classmethod
    def from_pretrained(cls, path) -> "K3Config":
        """Reads `config.json` from a checkpoint folder (or the file itself)."""
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise CheckpointError("no config.json there; is this a checkpoint folder?", file=file)
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise CheckpointError(f"config.json cannot be read: {error}", file=file) from error
        if not isinstance(raw, dict):
            raise CheckpointError("config.json holds no JSON object", file=file)
        try:
            named = _strings(raw.get("architectures") or (), "architectures")
            if text := raw.get("text_config"):
                inner = _object(text, "text_config").get("architectures")
                named += _strings(inner or (), "text_config.architectures")
            kind = raw.get("model_type")
            inner_kind = text.get("model_type", "kimi_linear") if text else "kimi_linear"
            known = kind in sorted(_MODEL_TYPES) and inner_kind in sorted(_MODEL_TYPES)
            if not known or not _ARCHITECTURES.issuperset(named):
                raise CheckpointError(
                    f"unknown architecture: model_type={kind!r}, architectures={list(named)}; "
                    f"k3jax reads model_type {sorted(_MODEL_TYPES)} with {sorted(_ARCHITECTURES)}",
                    file=file,
                )
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "K3Config":
        """Builds from the decoded JSON, nested (`text_config`) or flat."""
        text = raw.get("text_config")
        merged = dict(raw) if text is None else _merge_levels(raw, _object(text, "text_config"))
        is_kimi_linear = text is None and raw.get("model_type") == "kimi_linear"
        if "model_max_length" in merged:
            length = merged.pop("model_max_length")
            if merged.setdefault("max_position_embeddings", length) != length:
                raise ConfigError(
                    f"model_max_length={length} contradicts max_position_embeddings="
                    f"{merged['max_position_embeddings']}"
                )
        merged["dtype"] = _dtype_name(merged)
        merged.pop("torch_dtype", None)
        if merged.get("activation_situ_beta") == 0:
            del merged["activation_situ_beta"]  # as good as absent in the reference model
        heads = merged.get("num_attention_heads")
        if merged.pop("num_key_value_heads", heads) not in (heads, None):
            raise ConfigError(
                "num_key_value_heads must equal num_attention_heads: MLA has one latent"
            )
        if merged.get("routed_expert_hidden_size") and "latent_moe_use_norm" not in merged:
            raise ConfigError(
                "latent_moe_use_norm is missing: it has no safe default when "
                "routed_expert_hidden_size is set"
            )
        for key, block, kind in (
            ("linear_attn_config", LinearAttentionConfig, "required"),
            ("vision_config", VisionConfig, "optional"),
        ):
            if merged.get(key) is None and kind == "required":
                raise ConfigError(f"{key} is missing")
            if merged.get(key) is not None:
                merged[key] = _build(block, _object(merged[key], key), where=f"{key}.")
        if merged.get("quantization_config") is not None:
            merged["quantization_config"] = _quantization(
                _object(merged["quantization_config"], "quantization_config")
            )
        return _build(cls, merged | {"is_kimi_linear": is_kimi_linear})

    @classmethod
    def preset(cls, name: str) -> "K3Config":
        """One of "k3", "k3-slice-4l" (its first layers), "kimi-linear-48b", "tiny", "tiny-8"."""
        if name not in _PRESETS:
            raise ConfigError(f"unknown preset {name!r}; there are {sorted(_PRESETS)}")
        return _PRESETS[name]()

    def replace(self, **changes) -> "K3Config":
        """A copy with some fields changed, validated anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the published layout: K3 nests `text_config`, Kimi-Linear is flat."""
        text: dict[str, Any] = {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in _NOT_IN_TEXT
        }
        text |= {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "num_key_value_heads": self.num_attention_heads,
        }
        if self.quantization_config is not None:
            text["quantization_config"] = _quantization_dict(self.quantization_config)
        if self.is_kimi_linear:
            text["model_max_length"] = text.pop("max_position_embeddings")
            return text
        kind = "ForCausalLM" if self.vision_config is None else "ForConditionalGeneration"
        top: dict[str, Any] = {"architectures": [f"KimiK3{kind}"], "model_type": "kimi_k3"}
        if self.media_placeholder_token_id is not None:
            top["media_placeholder_token_id"] = self.media_placeholder_token_id
        top["text_config"] = text
        if self.vision_config is not None:
            top["vision_config"] = _plain(self.vision_config)
        return top


_NOT_IN_TEXT = {
    "quantization_config",
    "vision_config",
    "media_placeholder_token_id",
    "is_kimi_linear",
}


def _merge_levels(raw: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """text_config over the top level; a key that changes the model may not differ between them."""
    known = {f.name for f in dataclasses.fields(K3Config)} | {"torch_dtype"}
    for key in raw.keys() & text.keys() & known:
        if raw[key] != text[key]:
            raise ConfigError(f"{key}={raw[key]!r} contradicts text_config.{key}={text[key]!r}")
    return {k: v for k, v in raw.items() if k != "text_config"} | dict(text)


def _dtype_name(merged: Mapping[str, Any]) -> str:
    names = {
        str(merged[key]).removeprefix("torch.")
        for key in ("dtype", "torch_dtype")
        if merged.get(key) is not None
    }
    if len(names) > 1:
        raise ConfigError(
            f"dtype={merged['dtype']!r} contradicts torch_dtype={merged['torch_dtype']!r}"
        )
    return names.pop() if names else "bfloat16"


def _quantization(raw: Mapping[str, Any]) -> QuantizationConfig:
    """Accepts weight-only MXFP4 in groups of 32 input columns, as compressed-tensors writes it."""
    name = "quantization_config.config_groups"
    groups = [_object(g, name) for g in _object(raw.get("config_groups") or {}, name).values()]
    formats = [raw.get("format"), *(group.get("format") for group in groups)]
    formats = [format_ for format_ in formats if format_ is not None]
    if not formats or any(format_ != "mxfp4-pack-quantized" for format_ in formats):
        raise ConfigError(
            f"quantization_config.format={formats} is not supported; "
            "k3jax reads mxfp4-pack-quantized"
        )
    for group in groups:
        weights = _object(group.get("weights") or {}, f"{name} weights")
        expected = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        for key, value in expected.items():
            if weights.get(key, value) != value:
                raise ConfigError(
                    f"quantization_config weights.{key}={weights[key]!r}; MXFP4 has {value!r}"
                )
        if group.get("input_activations") is not None:
            raise ConfigError("quantization_config.input_activations must be null: weights only")
    ignore = raw.get("ignore")
    if ignore is None:
        return QuantizationConfig()
    return QuantizationConfig(ignore=_strings(ignore, "quantization_config.ignore"))


def _quantization_dict(quantization: QuantizationConfig) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": quantization.group_size,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(quantization.ignore),
    }


def _plain(value):
    """Dataclasses and tuples as JSON-ready dictionaries and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _build(kind, raw: Mapping[str, Any], *, where: str = ""):
    """A dataclass from a JSON object: types checked, unknown keys warned about once."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    for key, value in raw.items():
        if key in fields:
            optional = "None" in str(fields[key].type)
            if value is None and not optional:
                continue  # an explicit null means the default
            values[key] = _checked(fields[key], value, where + key)
        elif key not in _INERT and where + key not in _warned and kind is not VisionConfig:
            _warned.add(where + key)
            logger.warning("config key %s is not known to k3jax and has no effect", where + key)
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing keys: {', '.join(where + name for name in missing)}")
    return kind(**values)


def _checked(spec: dataclasses.Field, value, name: str):
    """`value` as the field's type; integers must be integers, lists become tuples."""
    kinds = str(spec.type)
    if "tuple" in kinds:
        if "str" in kinds:
            return _strings(value, name)
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise ConfigError(f"{name}={value!r} must be a list of integers")
        return tuple(value)
    if value is None or not isinstance(value, (bool, int, float, str)):
        if value is None or dataclasses.is_dataclass(value):
            return value
        raise ConfigError(f"{name}={value!r} has the wrong type; expected {kinds}")
    scalar = spec.type if isinstance(spec.type, type) else str(spec.type).split(" ")[0]
    wanted = scalar.__name__ if isinstance(scalar, type) else scalar
    if wanted == "bool" and not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")
    if wanted == "int" and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name}={value!r} must be an integer")
    if wanted == "float":
        try:
            number = math.nan if isinstance(value, (bool, str)) else float(value)
        except OverflowError:  # an integer beyond any float
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be a finite number")
        return number
    if wanted == "str" and not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be a string")
    return value


def _object(value, name: str) -> Mapping[str, Any]:
    """`value` if it is a JSON object."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be an object")
    return value


def _strings(value, name: str) -> tuple[str, ...]:
    """`value` if it is a list of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name}={value!r} must be a list of strings")
    return tuple(value)


def _validate(c: K3Config) -> None:
    """Refuses settings that contradict each other or that no K3 checkpoint has."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)

    positive = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "max_position_embeddings",
        "moe_layer_freq",
        "activation_situ_beta",
        "rms_norm_eps",
        "mla_lora_norm_eps",
        "initializer_range",
    ]
    for name in positive:
        require(getattr(c, name) > 0, f"{name}={getattr(c, name)} must be positive")
    for name in ("q_lora_rank", "attn_res_block_size", "activation_situ_linear_beta"):
        value = getattr(c, name)
        require(value is None or value > 0, f"{name}={value} must be positive or null")
    for name in ("num_experts", "first_k_dense_replace", "num_nextn_predict_layers"):
        require(getattr(c, name) >= 0, f"{name}={getattr(c, name)} must not be negative")
    require(c.dtype in _DTYPES, f"dtype={c.dtype!r} must be one of {sorted(_DTYPES)}")
    require(
        c.mla_use_nope,
        "mla_use_nope=false is not supported: K3 and Kimi-Linear rotate no key of the text model",
    )
    require(c.logit_scale > 0, f"logit_scale={c.logit_scale} must be positive")
    require(c.hidden_act in ("silu", "situ"), f"hidden_act={c.hidden_act!r} must be silu or situ")

    linear = c.linear_attn_config
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        value = getattr(linear, name)
        require(value > 0, f"linear_attn_config.{name}={value} must be positive")
    require(
        linear.short_conv_kernel_size >= 2,
        "linear_attn_config.short_conv_kernel_size must be at least 2",
    )
    require(
        linear.gate_lower_bound is None or -5.0 <= linear.gate_lower_bound < 0,
        f"linear_attn_config.gate_lower_bound={linear.gate_lower_bound} must be in [-5, 0) or null",
    )
    listed = sorted(linear.kda_layers + linear.full_attn_layers)
    count = c.num_hidden_layers
    require(
        len(listed) == count and listed == list(range(1, count + 1)),
        "linear_attn_config.kda_layers and full_attn_layers must together name each of the layers "
        f"1..{c.num_hidden_layers} once (num_hidden_layers={c.num_hidden_layers})",
    )
    if c.num_experts:
        _validate_moe(c, require)
    else:
        require(
            not c.routed_expert_hidden_size, "routed_expert_hidden_size is set but num_experts is 0"
        )
        require(c.quantization_config is None, "quantization_config is set but num_experts is 0")
    if c.media_placeholder_token_id is not None:
        require(
            0 <= c.media_placeholder_token_id < c.vocab_size,
            f"media_placeholder_token_id={c.media_placeholder_token_id} is outside the vocabulary",
        )
    if c.vision_config is not None:
        require(
            c.vision_config.text_hidden_size == c.hidden_size,
            f"vision_config.text_hidden_size={c.vision_config.text_hidden_size} contradicts "
            f"hidden_size={c.hidden_size}",
        )


def _validate_moe(c: K3Config, require) -> None:
    require(
        0 < c.num_experts_per_token <= c.num_experts,
        f"num_experts_per_token={c.num_experts_per_token} must be in 1..{c.num_experts}",
    )
    require(c.moe_intermediate_size > 0, "moe_intermediate_size must be positive")
    require(
        c.routed_scaling_factor > 0,
        f"routed_scaling_factor={c.routed_scaling_factor} must be positive",
    )
    require(c.num_shared_experts >= 0, "num_shared_experts must not be negative")
    require(
        c.moe_router_activation_func in ("sigmoid", "softmax"),
        f"moe_router_activation_func={c.moe_router_activation_func!r} must be sigmoid or softmax",
    )
    require(
        c.topk_method == "noaux_tc",
        f"topk_method={c.topk_method!r} is not supported; only noaux_tc is",
    )
    groups, kept = c.router_groups
    require(
        groups > 0 and c.num_experts % groups == 0,
        f"num_expert_group={groups} must divide num_experts={c.num_experts}",
    )
    require(0 < kept <= groups, f"topk_group={kept} must be in 1..{groups}")
    require(
        c.num_experts_per_token <= kept * (c.num_experts // groups),
        f"num_experts_per_token={c.num_experts_per_token} exceeds the experts of topk_group={kept}",
    )
    require(
        groups == 1 or c.num_experts // groups >= 2,
        "each expert group needs two experts: a group is scored by its best two",
    )
    require(
        not c.latent_moe_use_norm or c.routed_expert_hidden_size is not None,
        "latent_moe_use_norm=true without routed_expert_hidden_size: there is no latent to norm",
    )
    if c.quantization_config is not None:
        group = c.quantization_config.group_size
        require(group == 32, f"quantization_config.group_size={group} must be 32, as MXFP4 has it")
        for name, width in (
            ("moe_intermediate_size", c.moe_intermediate_size),
            ("expert input width", c.expert_hidden_size),
        ):
            require(width % 32 == 0, f"{name}={width} must be a multiple of 32 for MXFP4 experts")


# Presets.


def _linear_attention(num_layers: int, num_heads: int, head_dim: int, full: list[int], **more):
    kda = tuple(i for i in range(1, num_layers + 1) if i not in full)
    return LinearAttentionConfig(num_heads, head_dim, kda, tuple(full), **more)


def _k3() -> K3Config:
    full = [*range(4, 93, 4), 93]
    return K3Config(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=33792,
        num_hidden_layers=93,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=_linear_attention(
            93, 96, 128, full, use_full_rank_gate=True, gate_lower_bound=-5.0
        ),
        mla_use_output_gate=True,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        max_position_embeddings=1048576,
        attn_res_block_size=12,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        latent_moe_use_norm=True,
        first_k_dense_replace=1,
        quantization_config=QuantizationConfig(),
        vision_config=VisionConfig(
            vt_hidden_size=1024,
            vt_num_hidden_layers=27,
            vt_num_attention_heads=12,
            vt_intermediate_size=4096,
            qkv_hidden_size=1536,
            text_hidden_size=7168,
        ),
        media_placeholder_token_id=163605,
    )


def _k3_slice() -> K3Config:
    """The first four layers at full width: KDA + dense, KDA + MoE twice, MLA + MoE; text only."""
    k3 = _k3()
    linear = dataclasses.replace(k3.linear_attn_config, kda_layers=(1, 2, 3), full_attn_layers=(4,))
    return k3.replace(num_hidden_layers=4, linear_attn_config=linear, vision_config=None)


def _kimi_linear() -> K3Config:
    full = [4, 8, 12, 16, 20, 24, 27]
    return K3Config(
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=27,
        num_attention_heads=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=_linear_attention(27, 32, 128, full),
        max_position_embeddings=1048576,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        is_kimi_linear=True,
    )


def _tiny() -> K3Config:
    """Every feature at toy widths; distinct sizes, so that a transposed tensor fails on shape."""
    return K3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=9,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_attn_config=_linear_attention(
            9, 4, 32, [4, 8, 9], use_full_rank_gate=True, gate_lower_bound=-5.0
        ),
        mla_use_output_gate=True,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=4,
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=64,
        routed_expert_hidden_size=64,
        latent_moe_use_norm=True,
        first_k_dense_replace=1,
        dtype="float32",  # CPUs have no bfloat16 arithmetic
        quantization_config=QuantizationConfig(),
        vision_config=VisionConfig(
            vt_hidden_size=32,
            vt_num_hidden_layers=2,
            vt_num_attention_heads=2,
            vt_intermediate_size=64,
            qkv_hidden_size=64,
            text_hidden_size=128,
            init_pos_emb_height=8,
            init_pos_emb_width=8,
            mm_hidden_size=32,
        ),
        media_placeholder_token_id=789,
    )


def _tiny_8() -> K3Config:
    """Like tiny, but every sharded size divides by 8 (and by 8 MXFP4 groups)."""
    return _tiny().replace(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=13,
        num_attention_heads=8,
        linear_attn_config=_linear_attention(
            13, 8, 32, [4, 8, 12, 13], use_full_rank_gate=True, gate_lower_bound=-5.0
        ),
        attn_res_block_size=3,
        moe_intermediate_size=256,
        routed_expert_hidden_size=128,
        vision_config=None,
        media_placeholder_token_id=None,
    )


_PRESETS = {
    "k3": _k3,
    "k3-slice-4l": _k3_slice,
    "kimi-linear-48b": _kimi_linear,
    "tiny": _tiny,
    "tiny-8": _tiny_8,
}
