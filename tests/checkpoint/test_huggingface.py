"""The published layout: models survive the disk bit by bit, and bad folders are refused by name."""

import dataclasses
import logging
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from k3jax import K3Config, K3Model
from k3jax.checkpoint import convert, huggingface, mxfp4, names
from k3jax.checkpoint.huggingface import check_huggingface, save_huggingface
from k3jax.checkpoint.safetensors import SINGLE_NAME
from k3jax.checkpoint.tiny import is_untrained, make_tiny, random_model
from k3jax.distributed.mesh import make_mesh
from k3jax.distributed.sharding import RULES
from k3jax.errors import CheckpointError, ConfigError
from tests.checkpoint.folders import (
    assert_same_tensors,
    copy,
    edit,
    edit_config,
    edit_index,
    read_config,
    read_tensors,
)
from tests.micro import MICRO, MICRO_KIMI_LINEAR

BF16 = ml_dtypes.bfloat16
KDA = "language_model.model.layers.0.self_attn."
MLA = "language_model.model.layers.1.self_attn."
MOE = "language_model.model.layers.1.block_sparse_moe."
# The tensors that are float32 in memory whatever the file holds.
FLOAT32 = (
    "A_log",
    "dt_bias",
    "q_conv1d.weight",
    "k_conv1d.weight",
    "v_conv1d.weight",
    "o_norm.weight",
    "e_score_correction_bias",
)
GOLDENS = ["k3_text", "k3_sharded", "k3_full_mxfp4", "k3_bf16", "kimi_linear"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """MICRO with random weights, as `save_pretrained` writes it. Not to be changed."""
    folder = tmp_path_factory.mktemp("micro")
    random_model(MICRO).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of `saved`."""
    return copy(saved, tmp_path / "checkpoint")


@pytest.fixture
def shards(saved, tmp_path) -> Path:
    """The same weights in several shards with an index."""
    folder = copy(saved, tmp_path / "shards")
    edit(folder, lambda tensors: None, max_shard_bytes=100_000)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def weights(model: K3Model) -> dict[str, np.ndarray]:
    """Parameters by dotted name."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in state}


def refused(folder, *fragments, tensor=None, file=None, error=CheckpointError):
    """Loading raises an error that names tensor and file and says `fragments`."""
    with pytest.raises(error) as caught:
        K3Model.from_pretrained(folder)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    if tensor is not None:
        assert caught.value.tensor == tensor and tensor in message
    if file is not None:
        assert Path(caught.value.file).name == file and file in message


# Round trips.


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_round_trip(golden, name, tmp_path):
    """Every tensor that belongs to the text model is written as it was read."""
    original = {k: v for k, v in read_tensors(golden / name).items() if not names.VISION.match(k)}
    K3Model.from_pretrained(golden / name).save_pretrained(tmp_path)
    assert_same_tensors(read_tensors(tmp_path), original)
    config = K3Config.from_pretrained(golden / name).replace(vision_config=None)
    assert K3Config.from_pretrained(tmp_path) == config


def test_shapes_and_dtypes_of_the_published_layout(saved):
    tensors = read_tensors(saved)
    assert tensors[KDA + "A_log"].shape == (128,)
    assert not tensors[KDA + "A_log"][4:].any() and tensors[KDA + "A_log"][:4].all()
    assert tensors[KDA + "dt_bias"].shape == (32,)
    assert tensors[KDA + "q_conv1d.weight"].shape == (32, 1, 4)
    assert tensors[KDA + "o_norm.weight"].shape == (8,)
    assert tensors[MLA + "kv_b_proj.weight"].shape == (2 * (12 + 14), 24)
    assert tensors["language_model.model.layers.0.mlp_res_proj.weight"].shape == (1, 40)
    assert tensors["language_model.model.output_attn_res_norm.weight"].shape == (40,)
    assert tensors["language_model.lm_head.weight"].shape == (64, 40)
    assert tensors[MOE + "experts.7.w3.weight_packed"].shape == (64, 16)
    assert tensors[MOE + "experts.0.w2.weight_scale"].shape == (32, 2)
    assert tensors[MOE + "experts.0.w2.weight_scale"].dtype == np.uint8
    assert read_config(saved)["text_config"]["quantization_config"]["format"] == (
        "mxfp4-pack-quantized"
    )


def test_kimi_linear_layout(tmp_path):
    model = random_model(MICRO_KIMI_LINEAR)
    model.save_pretrained(tmp_path)
    tensors = read_tensors(tmp_path)
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert tensors["model.layers.0.self_attn.A_log"].dtype == np.float32
    assert tensors["model.layers.0.self_attn.g_b_proj.weight"].dtype == BF16
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (2 * 16, 40)
    assert tensors["model.layers.1.block_sparse_moe.experts.7.w2.weight"].shape == (40, 64)
    assert "lm_head.weight" in tensors and not any("res" in name.split("_") for name in tensors)
    assert "text_config" not in read_config(tmp_path)
    assert_same_tensors(weights(K3Model.from_pretrained(tmp_path)), weights(model))


def test_tied_embeddings(tmp_path):
    model = random_model(MICRO.replace(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    assert not any("lm_head" in name for name in read_tensors(tmp_path))
    assert_same_tensors(weights(K3Model.from_pretrained(tmp_path)), weights(model))


def test_untouched_codes_keep_their_bytes(folder):
    """−0 codes, and groups that a quantiser would give another scale, come back as they were."""
    packed, scale = MOE + "experts.3.w1.weight_packed", MOE + "experts.3.w1.weight_scale"

    def change(tensors):
        tensors[packed][0] = 0x80  # -0.0 in every odd column
        tensors[packed][1] = 0x11  # codes of 1 at most
        tensors[scale][2] = 0

    edit(folder, change)
    before = read_tensors(folder)
    K3Model.from_pretrained(folder).save_pretrained(folder)
    assert_same_tensors(read_tensors(folder), before)


def test_save_in_shards(folder, tmp_path):
    model = K3Model.from_pretrained(folder)
    save_huggingface(model, tmp_path / "many", max_shard_bytes=100_000)
    assert_same_tensors(read_tensors(tmp_path / "many"), read_tensors(folder))
    assert_same_tensors(weights(K3Model.from_pretrained(tmp_path / "many")), weights(model))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(BF16)])
def test_dtype_override(folder, dtype):
    exact, narrow = (weights(K3Model.from_pretrained(folder, dtype=d)) for d in (None, dtype))
    for name, value in exact.items():
        if value.dtype == np.uint8 or name.endswith(FLOAT32):
            assert narrow[name].dtype == value.dtype
            np.testing.assert_array_equal(narrow[name], value)
        else:
            assert narrow[name].dtype == BF16
            np.testing.assert_array_equal(narrow[name], value.astype(BF16))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "bf17", object()])
def test_dtypes_of_no_model_are_refused(folder, dtype):
    with pytest.raises(ConfigError, match="dtype"):
        K3Model.from_pretrained(folder, dtype=dtype)


STORED = {"float32": np.float32, "bfloat16": BF16, "float16": np.float16}


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", STORED)
def test_stored_dtypes(folder, stored, model_dtype):
    """F060: A_log, dt_bias, convolutions, o_norm and the router's bias are float32 in memory with
    the file's values; the other floats take the model's dtype."""
    changed = {}

    def change(tensors):
        for name, x in tensors.items():
            changed[name] = x if x.dtype == np.uint8 else x.astype(STORED[stored])
        return changed

    edit(folder, change)
    loaded = weights(K3Model.from_pretrained(folder, dtype=model_dtype))
    for name, value in loaded.items():
        if value.dtype == np.uint8:
            assert name.endswith(("_packed", "_scale"))
        else:
            wanted = np.float32 if name.endswith(FLOAT32) else jnp.dtype(model_dtype)
            assert value.dtype == wanted, name
    conv = changed[KDA + "q_conv1d.weight"].astype(np.float32).reshape(4, 8, 4)
    np.testing.assert_array_equal(loaded["layers.0.self_attn.q_conv1d.weight"], conv)
    rate = changed[KDA + "A_log"].astype(np.float32)[:4]
    np.testing.assert_array_equal(loaded["layers.0.self_attn.A_log"], rate)
    head = changed["language_model.lm_head.weight"].astype(jnp.dtype(model_dtype))
    np.testing.assert_array_equal(loaded["lm_head.weight"], head)


def test_router_bias_stays_float32(folder):
    """F057: equal scores and biases that differ by less than bfloat16 can tell."""
    bias = (0.5 + np.arange(8) * 1e-4).astype(np.float32)

    def change(tensors):
        tensors[MOE + "gate.weight"][:] = 0  # every score is 0.5
        tensors[MOE + "gate.e_score_correction_bias"] = bias

    edit(folder, change)
    edit_config(folder, lambda c: c.update(dtype="bfloat16", num_expert_group=1))
    model = K3Model.from_pretrained(folder)
    moe = model.layers[1].block_sparse_moe
    assert model.dtype == BF16 and moe.gate.e_score_correction_bias[...].dtype == np.float32
    np.testing.assert_array_equal(moe.gate.e_score_correction_bias[...], bias)
    found = {}
    moe(jnp.ones((1, 40), BF16), lambda name, value: found.update({name: value()}))
    np.testing.assert_array_equal(found["router"][0], [[7, 6]])


# Spellings.


@pytest.mark.parametrize("move_all", [False, True], ids=["layers_only", "all"])
def test_vllm_spelling(folder, move_all):
    """`language_model.layers.` for `language_model.model.layers.`."""
    expected = weights(K3Model.from_pretrained(folder))
    long = "language_model.model." if move_all else "language_model.model.layers."
    short = long.replace("model.model.", "model.")
    edit(folder, lambda t: {name.replace(long, short): x for name, x in t.items()})
    assert any(name.startswith("language_model.layers.") for name in read_tensors(folder))
    assert_same_tensors(weights(K3Model.from_pretrained(folder)), expected)


def test_prefix_comes_from_the_names(folder):
    """K3's features under Kimi-Linear's names."""
    expected = weights(K3Model.from_pretrained(folder))
    edit(folder, lambda t: {k.removeprefix("language_model."): x for k, x in t.items()})
    assert_same_tensors(weights(K3Model.from_pretrained(folder)), expected)


@pytest.mark.parametrize("rename", ["transformer.h.{}.", "decoder.{}."])
def test_names_of_another_model(folder, rename):
    def change(tensors):
        return {
            name.replace("language_model.model.layers.", rename.split("{")[0]): x
            for name, x in tensors.items()
        }

    edit(folder, change)
    refused(folder, "prefixes of `layers.`")


def test_two_prefixes(folder):
    def change(tensors):
        tensors["model.layers.0.input_layernorm.weight"] = np.ones(40, np.float32)

    edit(folder, change)
    refused(folder, "['language_model.model.', 'model.']")


@pytest.mark.parametrize(
    "shape", [(4,), (5,), (128,), (256,), (1, 1, 4, 1)], ids=lambda s: "x".join(map(str, s))
)
@pytest.mark.parametrize("config", [MICRO, MICRO_KIMI_LINEAR], ids=["k3", "kimi_linear"])
def test_shapes_of_a_log(tmp_path, config, shape):
    model = random_model(config)
    model.save_pretrained(tmp_path)
    expected = weights(model)["layers.0.self_attn.A_log"]
    name = names.published_prefix(config) + "layers.0.self_attn.A_log"

    def change(tensors):
        tensors[name] = np.pad(expected, (0, int(np.prod(shape)) - 4)).reshape(shape)

    edit(tmp_path, change)
    found = weights(K3Model.from_pretrained(tmp_path))["layers.0.self_attn.A_log"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", [4, 127])
def test_tail_of_a_log_must_be_zero(folder, place):
    def change(tensors):
        tensors[KDA + "A_log"][place] = 0.25

    edit(folder, change)
    refused(folder, "padding after the 4 heads", tensor=KDA + "A_log", file=SINGLE_NAME)


@pytest.mark.parametrize("shape", [(3,), (1, 128), (1, 1, 5, 1), (4, 1)])
def test_other_shapes_of_a_log(folder, shape):
    edit(folder, lambda t: t.update({KDA + "A_log": np.ones(shape, np.float32)}))
    refused(folder, "shape", str(list(shape)), tensor=KDA + "A_log", file=SINGLE_NAME)


# Missing, extra and misshapen tensors.

EVERY_KIND = [
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
    "language_model.model.output_attn_res_proj.weight",
    "language_model.lm_head.weight",
    "language_model.model.layers.0.self_attention_res_norm.weight",
    KDA + "q_proj.weight",
    KDA + "A_log",
    KDA + "dt_bias",
    KDA + "k_conv1d.weight",
    "language_model.model.layers.0.mlp.down_proj.weight",
    MLA + "q_a_layernorm.weight",
    MLA + "kv_b_proj.weight",
    MOE + "gate.e_score_correction_bias",
    MOE + "routed_expert_norm.weight",
    MOE + "shared_experts.up_proj.weight",
    MOE + "experts.5.w2.weight_packed",
    MOE + "experts.7.w3.weight_scale",
]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_missing_tensor(folder, name):
    edit(folder, lambda tensors: {k: x for k, x in tensors.items() if k != name})
    refused(folder, "missing", tensor=name, file=folder.name)


@pytest.mark.parametrize("name", [name for name in EVERY_KIND if "A_log" not in name])
def test_wrong_shape(folder, name):
    def change(tensors):
        x = tensors[name]
        tensors[name] = np.concatenate([x, x[:1]])

    edit(folder, change)
    shape = list(read_tensors(folder)[name].shape)
    refused(folder, str(shape), "config.json implies", tensor=name, file=SINGLE_NAME)


def test_transposed_weight(folder):
    name = MLA + "o_proj.weight"
    edit(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    refused(folder, "[28, 40]", "[40, 28]", tensor=name)


EXTRA = {
    "bias": KDA + "q_proj.bias",
    "rotary_buffer": MLA + "rotary_emb.inv_freq",
    "expert_beyond_the_config": MOE + "experts.8.w1.weight_packed",
    "dense_beside_packed": MOE + "experts.0.w1.weight",
    "layer_beyond_the_config": "language_model.model.layers.2.input_layernorm.weight",
    "adapter": MOE + "experts.0.w1.lora_A.weight",
    "name_that_contains_weight_packed": "adapter.weight_packed.weight",
    "latent_of_another_kind": "language_model.model.layers.0.mlp.routed_expert_norm.weight",
}


@pytest.mark.parametrize("case", EXTRA)
def test_extra_tensor(folder, case):
    edit(folder, lambda t: t.update({EXTRA[case]: np.ones(3, np.float32)}))
    refused(folder, "belongs to no part", tensor=EXTRA[case], file=SINGLE_NAME)


def test_silently_dropped_parts_are_refused(folder):
    """A config that forgets a part of the model leaves tensors over."""
    edit_config(folder, lambda c: c.update(latent_moe_use_norm=False))
    refused(folder, "belongs to no part", tensor=MOE + "routed_expert_norm.weight")


def test_vision_tensors_are_left_out(folder, caplog):
    extra = {
        "vision_tower.patch_embed.pos_emb.time_weight": np.ones(3, np.float64),  # an odd re-export
        "vision_tower.encoder.blocks.0.wo.weight": np.ones((2, 2), BF16),
        "mm_projector.proj.0.weight": np.ones((2, 2), BF16),
    }
    edit(folder, lambda t: t.update(extra))
    with caplog.at_level(logging.INFO, "k3jax"):
        K3Model.from_pretrained(folder)
    assert "3 tensors of vision" in caplog.text


def test_next_token_layers_are_left_out_when_the_config_names_them(folder):
    name = "language_model.model.layers.2.eh_proj.weight"
    edit(folder, lambda t: t.update({name: np.ones((40, 80), np.float32)}))
    refused(folder, "belongs to no part", tensor=name)
    edit_config(folder, lambda c: c.update(num_nextn_predict_layers=1))
    model = K3Model.from_pretrained(folder)
    model.save_pretrained(folder)
    assert name not in read_tensors(folder)
    assert read_config(folder)["text_config"]["num_nextn_predict_layers"] == 0
    K3Model.from_pretrained(folder)


# Values and dtypes.

BAD_DTYPES = {
    "f64": (KDA + "q_proj.weight", np.float64),
    "f8": (KDA + "dt_bias", ml_dtypes.float8_e4m3fn),
    "i32": (MOE + "gate.e_score_correction_bias", np.int32),
    "u8_float": ("language_model.lm_head.weight", np.uint8),
    "f32_codes": (MOE + "experts.1.w2.weight_packed", np.float32),
    "i8_codes": (MOE + "experts.1.w1.weight_packed", np.int8),
    "e8m0_scale": (MOE + "experts.1.w1.weight_scale", ml_dtypes.float8_e8m0fnu),
    "bool": ("language_model.model.norm.weight", np.bool_),
}


@pytest.mark.parametrize("case", BAD_DTYPES)
def test_dtypes_of_no_checkpoint_are_refused(folder, case):
    name, dtype = BAD_DTYPES[case]
    edit(folder, lambda t: t.update({name: np.zeros(t[name].shape, dtype)}))
    refused(folder, "not supported", tensor=name, file=SINGLE_NAME)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", [KDA + "A_log", MLA + "kv_b_proj.weight", "language_model.model.norm.weight"]
)
def test_values_must_be_finite(folder, name, value, dtype):
    def change(tensors):
        tensors[name] = tensors[name].astype(dtype)
        tensors[name].reshape(-1)[2] = value

    edit(folder, change)
    refused(folder, "finite", tensor=name, file=SINGLE_NAME)


def test_overflow_is_no_surprise(folder):
    """What float16 cannot hold is infinite in the file already, and refused."""
    name = "language_model.lm_head.weight"
    with np.errstate(over="ignore"):
        edit(folder, lambda t: t.update({name: (t[name] * 1e6).astype(np.float16)}))
    refused(folder, "finite", tensor=name)


@pytest.mark.parametrize("w", ["w1", "w2", "w3"])
def test_invalid_scale(folder, w):
    name = MOE + f"experts.4.{w}.weight_scale"

    def change(tensors):
        tensors[name][3, 0] = 255

    edit(folder, change)
    refused(folder, "255", tensor=name, file=SINGLE_NAME)


# Files. F058 and F059; the reader's own tests go further.


def test_deleted_shard(shards):
    gone = sorted(shards.glob("model-*"))[1]
    gone.unlink()
    refused(shards, "absent", file=gone.name)


def test_truncated_shard(shards):
    file = sorted(shards.glob("model-*"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    refused(shards, "truncated", file=file.name)


def test_tensor_deleted_from_the_index(shards):
    edit_index(shards, lambda weight_map: weight_map.pop(KDA + "o_proj.weight"))
    refused(shards, "not in model.safetensors.index.json", tensor=KDA + "o_proj.weight")


def test_index_names_a_tensor_of_no_file(shards):
    file = sorted(shards.glob("model-*"))[0].name
    edit_index(shards, lambda weight_map: weight_map.update(ghost=file))
    refused(shards, "does not hold", tensor="ghost", file=file)


def test_index_names_an_absent_file(shards):
    edit_index(shards, lambda weight_map: weight_map.update({KDA + "A_log": "model-9.safetensors"}))
    refused(shards, "absent", tensor=KDA + "A_log", file="model-9.safetensors")


def test_stray_file_beside_the_shards(shards, folder, caplog):
    expected = weights(K3Model.from_pretrained(shards))
    edit(folder, lambda t: {name: x + x.dtype.type(1) for name, x in t.items()})
    (folder / SINGLE_NAME).rename(shards / SINGLE_NAME)
    with caplog.at_level(logging.WARNING, "k3jax"):
        found = weights(K3Model.from_pretrained(shards))
    assert_same_tensors(found, expected)
    assert SINGLE_NAME in caplog.text


def test_tensor_in_two_shards(shards):
    first, second = sorted(shards.glob("model-*"))[:2]
    second.write_bytes(first.read_bytes())
    refused(shards, "two shards", file=second.name)


def test_name_of_the_hub_instead_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("moonshotai/Kimi-K3", "hf download moonshotai/Kimi-K3")


def test_folder_without_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json", file="config.json")


def test_folder_without_weights(folder):
    (folder / SINGLE_NAME).unlink()
    refused(folder, SINGLE_NAME)


def test_checks_without_reading(folder):
    config, opened = check_huggingface(folder)
    with opened:
        assert opened.bytes_read == 0 and config == K3Config.from_pretrained(folder)


def test_every_byte_is_read_once(folder, monkeypatch):
    opened = []
    original = huggingface.open_checkpoint
    monkeypatch.setattr(
        huggingface, "open_checkpoint", lambda path: opened.append(original(path)) or opened[0]
    )
    K3Model.from_pretrained(folder)
    # k_up and v_up each read kv_b_proj.
    twice = opened[0].info(MLA + "kv_b_proj.weight").nbytes
    assert opened[0].bytes_read == opened[0].total_bytes + twice


# Quantisation is decided by the tensors.


def test_packed_tensors_without_a_quantization_config(folder):
    expected = weights(K3Model.from_pretrained(folder))
    edit_config(folder, lambda c: c.pop("quantization_config"))
    model = K3Model.from_pretrained(folder)
    assert model.config.quantization_config is not None
    assert_same_tensors(weights(model), expected)


def test_dense_tensors_with_a_quantization_config(tmp_path):
    model = random_model(MICRO.replace(quantization_config=None))
    model.save_pretrained(tmp_path)
    quantized = MICRO.to_dict()["text_config"]["quantization_config"]
    edit_config(tmp_path, lambda c: c.update(quantization_config=quantized))
    assert_same_tensors(weights(K3Model.from_pretrained(tmp_path)), weights(model))


def test_one_packed_expert_among_dense_ones(folder):
    name = MOE + "experts.2.w1."

    def change(tensors):
        packed, scale = (tensors.pop(name + f"weight_{kind}") for kind in ("packed", "scale"))
        tensors[name + "weight"] = mxfp4.dequantize(packed, scale)

    edit(folder, change)
    refused(folder, "missing", tensor=name + "weight_packed")


WIDE = MICRO.replace(  # three groups of 32 each way, and heads for three devices
    vocab_size=66,
    num_attention_heads=3,
    moe_intermediate_size=96,
    routed_expert_hidden_size=96,
    linear_attn_config=dataclasses.replace(MICRO.linear_attn_config, num_heads=3),
)


def test_shards_of_packed_experts(tmp_path):
    """F061: each device holds what decoding the whole and then splitting gives."""
    model = random_model(WIDE)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)

    def change(tensors):
        for name, x in tensors.items():
            if name.endswith("_scale"):
                tensors[name] = rng.integers(100, 140, x.shape).astype(np.uint8)

    edit(tmp_path, change)
    tensors = read_tensors(tmp_path)

    def decoded(e, w):
        parts = (tensors[MOE + f"experts.{e}.{w}.weight_{kind}"] for kind in ("packed", "scale"))
        return mxfp4.dequantize(*parts)

    loaded = K3Model.from_pretrained(tmp_path, mesh=make_mesh(tp=3))
    experts = loaded.layers[1].block_sparse_moe.experts
    for device in range(3):
        columns = slice(32 * device, 32 * (device + 1))
        parts = {}
        for name in ("gate_up_packed", "gate_up_scale", "down_packed", "down_scale"):
            shard = getattr(experts, name)[...].addressable_shards[device]
            parts[name] = np.asarray(shard.data)
        up = mxfp4.dequantize(parts["gate_up_packed"], parts["gate_up_scale"])
        down = mxfp4.dequantize(parts["down_packed"], parts["down_scale"])
        for e in range(8):
            np.testing.assert_array_equal(up[e, 0], decoded(e, "w1")[columns])
            np.testing.assert_array_equal(up[e, 1], decoded(e, "w3")[columns])
            np.testing.assert_array_equal(down[e], decoded(e, "w2")[:, columns])


def test_width_of_no_whole_groups(tmp_path):
    """F061: 80 columns are two and a half groups."""
    random_model(MICRO.replace(quantization_config=None, moe_intermediate_size=80)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="moe_intermediate_size=80"):
        convert.quantize_experts(tmp_path, tmp_path / "packed")
    assert not (tmp_path / "packed" / SINGLE_NAME).exists()


# Quantising a checkpoint. F062.


@pytest.fixture
def dense(folder, tmp_path) -> Path:
    """MICRO with dense experts whose values MXFP4 can hold."""

    def change(tensors):
        for name in list(tensors):
            if name.endswith("_packed"):
                base = name.removesuffix("_packed")
                packed, scale = tensors.pop(name), tensors.pop(base + "_scale")
                tensors[base] = mxfp4.dequantize(packed, scale)

    edit(folder, change)
    edit_config(folder, lambda c: c.pop("quantization_config"))
    return folder


def test_only_experts_are_quantized(saved, dense, tmp_path):
    before = read_tensors(dense)
    convert.quantize_experts(dense, tmp_path / "packed")
    found, original = read_tensors(tmp_path / "packed"), read_tensors(saved)
    assert found.keys() == original.keys()
    for name, x in found.items():
        if x.dtype == np.uint8:
            continue
        assert name in before and x.tobytes() == before[name].tobytes(), name
    for name in (name for name in before if ".experts." in name):
        parts = (found[f"{name}_{kind}"] for kind in ("packed", "scale"))
        np.testing.assert_array_equal(mxfp4.dequantize(*parts), before[name])
    assert K3Model.from_pretrained(tmp_path / "packed").config == MICRO


def test_quantized_in_place(dense):
    (dense / "tokenizer_config.json").write_text("{}")
    convert.quantize_experts(dense, dense)
    assert K3Model.from_pretrained(dense).config == MICRO


def test_companions_are_copied_and_weights_are_not(dense, tmp_path):
    (dense / "tokenizer_config.json").write_text("{}")
    (dense / "stray.safetensors").write_text("")
    convert.quantize_experts(dense, tmp_path / "packed")
    names_found = {file.name for file in (tmp_path / "packed").iterdir()}
    assert names_found == {"tokenizer_config.json", "config.json", SINGLE_NAME}


def test_quantizing_twice_is_refused(saved, tmp_path):
    with pytest.raises(CheckpointError, match="MXFP4 already"):
        convert.quantize_experts(saved, tmp_path / "packed")


@pytest.mark.parametrize("case", ["adapter", "name_that_contains_weight_packed"])
def test_adapters_are_not_quantized_by_accident(dense, tmp_path, case):
    edit(dense, lambda t: t.update({EXTRA[case]: np.ones(32, np.float32)}))
    with pytest.raises(CheckpointError) as caught:
        convert.quantize_experts(dense, tmp_path / "packed")
    assert caught.value.tensor == EXTRA[case]


# On a mesh.


def test_loads_onto_a_mesh(saved):
    """Each device holds its part, and the parts make up the whole."""
    mesh = make_mesh(tp=2)
    model = K3Model.from_pretrained(saved, mesh=mesh)
    assert_same_tensors(weights(model), weights(K3Model.from_pretrained(saved)))
    split = 0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array, axes = variable.get_value(), variable.get_metadata()["logical_axes"]
        assert array.sharding.spec == RULES.spec(axes), path
        assert len(array.addressable_shards) == 2
        split += array.addressable_shards[0].data.size < array.size
    assert split > 20


def test_saves_from_a_mesh(saved, tmp_path):
    K3Model.from_pretrained(saved, mesh=make_mesh(tp=2)).save_pretrained(tmp_path)
    assert_same_tensors(read_tensors(tmp_path), read_tensors(saved))


def test_mesh_that_does_not_divide(saved):
    with pytest.raises(ConfigError, match="tp=3 does not divide vocab_size=64"):
        K3Model.from_pretrained(saved, mesh=make_mesh(tp=3))


# Interrupted saves.


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 30])
def test_interrupted_save_changes_nothing(folder, monkeypatch, after, error):
    before, config = read_tensors(folder), read_config(folder)
    original, calls = huggingface.write_checkpoint, []

    def failing(folder, tensors, **options):
        def counted(source):
            def make():
                calls.append(source.name)
                if len(calls) > after:
                    raise error
                return source.make()

            return source._replace(make=make)

        return original(folder, map(counted, tensors), **options)

    monkeypatch.setattr(huggingface, "write_checkpoint", failing)
    other = random_model(MICRO.replace(vocab_size=80), seed=1)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        other.save_pretrained(folder)
    monkeypatch.undo()
    assert_same_tensors(read_tensors(folder), before)
    assert read_config(folder) == config
    other.save_pretrained(folder)
    assert_same_tensors(weights(K3Model.from_pretrained(folder)), weights(other))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", SINGLE_NAME]


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save"):
        random_model(MICRO).save_pretrained(tmp_path / "file" / "folder")


def test_a_tied_head_may_be_stored_only_as_a_copy(tmp_path):
    random_model(MICRO.replace(tie_word_embeddings=True)).save_pretrained(tmp_path)
    embedding, head = (
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
    )
    edit(tmp_path, lambda tensors: tensors.update({head: tensors[embedding].copy()}))
    assert K3Model.from_pretrained(tmp_path).config.tie_word_embeddings

    def shorten(tensors):  # vLLM's spelling of layers, the other names as they are
        return {
            k.replace("language_model.model.layers.", "language_model.layers."): v
            for k, v in tensors.items()
        }

    edit(tmp_path, shorten)
    assert K3Model.from_pretrained(tmp_path).config.tie_word_embeddings
    edit(tmp_path, lambda tensors: tensors.update({head: tensors[embedding] + 1}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings") as caught:
        K3Model.from_pretrained(tmp_path)
    assert caught.value.tensor == head


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_scales_beyond_float32(tmp_path, scale):
    random_model(MICRO).save_pretrained(tmp_path)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"

    def damage(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][1, 0] = scale

    edit(tmp_path, damage)
    with pytest.raises(CheckpointError, match=str(scale)) as caught:
        K3Model.from_pretrained(tmp_path)
    assert caught.value.tensor == name


def test_values_that_the_model_dtype_cannot_hold(tmp_path):
    random_model(MICRO).save_pretrained(tmp_path)
    name = "language_model.model.norm.weight"
    huge = np.finfo(np.float32).max  # rounds to infinity in bfloat16
    edit(tmp_path, lambda tensors: tensors.update({name: np.full_like(tensors[name], huge)}))
    K3Model.from_pretrained(tmp_path, dtype="float32")
    with pytest.raises(CheckpointError, match="finite in bfloat16") as caught:
        K3Model.from_pretrained(tmp_path, dtype="bfloat16")
    assert caught.value.tensor == name


def test_saving_over_an_untrained_checkpoint_removes_its_mark(tmp_path):
    make_tiny(tmp_path)
    assert is_untrained(tmp_path)
    random_model(MICRO).save_pretrained(tmp_path)
    assert not is_untrained(tmp_path)
