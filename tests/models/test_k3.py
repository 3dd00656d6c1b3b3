"""K3Model against the float64 oracle, what it captures, its full-size layout, and meshes."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import K3Config, K3Model, SamplingParams, generate, generation
from k3jax.checkpoint import names
from k3jax.checkpoint.tiny import random_model
from k3jax.distributed.mesh import make_mesh
from k3jax.distributed.sharding import RULES
from k3jax.errors import ConfigError, RequestError
from k3jax.models.cache import Batch, Checkpoints, PrefillRows, allocate_cache
from k3jax.models.k3 import CAPTURES
from pallas_kernels.common.segments import Segments
from tests.micro import MICRO, MICRO_KIMI_LINEAR
from tests.models.comparison import LENGTHS, Comparison, compare
from tests.models.golden_runs import GOLDEN, LIMIT, run, within

STEPS = 10  # new tokens of most calls here: few programs are compiled

# What the goldens do not have.
VARIANTS = {
    "tiny": K3Config.preset("tiny"),
    "micro": MICRO,
    "unusual_values": MICRO.replace(
        rms_norm_eps=1e-2,
        mla_lora_norm_eps=1e-2,
        activation_situ_beta=2.0,
        activation_situ_linear_beta=None,
        logit_scale=0.5,
        routed_scaling_factor=1.7,
        moe_renormalize=False,
        moe_router_activation_func="softmax",
        use_grouped_topk=False,
        num_shared_experts=0,
        latent_moe_use_norm=False,
        quantization_config=None,
        tie_word_embeddings=True,
        first_k_dense_replace=0,
        linear_attn_config=dataclasses.replace(
            MICRO.linear_attn_config,
            short_conv_kernel_size=3,
            gate_lower_bound=-2.0,
            use_full_rank_gate=False,
        ),
    ),
    # One expert a token: its weight is not renormalised to 1. Without a latent norm that shows.
    "one_expert": MICRO_KIMI_LINEAR.replace(num_experts_per_token=1, dtype="float32"),
}


@pytest.fixture(scope="session")
def comparisons(tmp_path_factory):
    """Comparison by name, each made when it is first asked for."""

    @functools.cache
    def made(name: str) -> Comparison:
        return compare(VARIANTS[name], tmp_path_factory.mktemp(name))

    return made


@pytest.fixture(params=VARIANTS)
def case(request, comparisons) -> Comparison:
    return comparisons(request.param)


def test_logits_equal_the_oracle(case):
    within(3e-4, logits=case.pairs(case.found[0], lambda result: result.logits))


def test_hidden_states_equal_the_oracle(case):
    captured = case.found[1]
    pairs = {"final_norm": case.pairs(captured["final_norm"], lambda result: result.final_norm)}
    for layer, value in captured["prefix_sum"].items():
        pairs[f"layer {layer}"] = case.pairs(value, lambda result, layer=layer: result.out[layer])
    within(3e-4, **pairs)


def test_routing_equals_the_oracle(case):
    for layer, (ids, weights) in case.found[1]["router"].items():
        got, expected = case.pairs(ids, lambda result, layer=layer: result.router[layer][0])
        np.testing.assert_array_equal(got, expected)
        pair = case.pairs(weights, lambda result, layer=layer: result.router[layer][1])
        within(1e-4, weights=pair)


def test_memory_equals_the_oracle(case):
    captured, states, latents = case.found[1], {}, {}
    for layer, memory in captured["kda_state"].items():
        for row, result in enumerate(case.expected):
            states[f"{layer}.{row}"] = memory.state[row], result.states[layer]
            for kind, tail in result.conv_inputs[layer].items():
                got = getattr(memory, f"conv_{kind}")[row]
                states[f"{layer}.{row}.{kind}"] = got.reshape(tail.shape), tail
    for layer, rows in captured["mla_latent"].items():
        latents[str(layer)] = case.pairs(rows, lambda result, layer=layer: result.latents[layer])
    within(1e-4, **states)
    within(3e-4, **latents)


# Captures.


def test_capture_shapes(comparisons):
    """Layers by number, token axes first, float32 logits, for a model with every part."""
    case = comparisons("tiny")
    config, (logits, captured) = case.config, case.found
    batch, width, dim = *case.ids.shape, config.hidden_size
    linear, layers = config.linear_attn_config, range(config.num_hidden_layers)
    kda = [i for i in layers if config.layer_types[i] == "kda"]
    mla = [i for i in layers if config.layer_types[i] == "mla"]
    assert logits.shape == (batch, width, config.vocab_size) and logits.dtype == jnp.float32
    assert set(captured) == set(CAPTURES)
    for name in ("prefix_sum", "attn_out", "mlp_out"):
        assert list(captured[name]) == list(layers)
        assert {x.shape for x in captured[name].values()} == {(batch, width, dim)}
    assert captured["final_norm"].shape == (batch, width, dim)
    assert captured["block_residuals"].shape == (batch, width, config.num_bank_rows(9), dim)
    assert list(captured["router"]) == [i for i in layers if config.is_moe_layer(i)]
    for ids, weights in captured["router"].values():
        assert ids.shape == weights.shape == (batch, width, config.num_experts_per_token)
        assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    assert list(captured["kda_state"]) == kda
    for memory in captured["kda_state"].values():
        heads, size = linear.num_heads, linear.head_dim
        assert memory.state.shape == (batch, heads, size, size)
        assert memory.conv_q.shape == memory.conv_v.shape == (batch, 3, heads, size)
    assert list(captured["mla_latent"]) == mla
    row = config.kv_lora_rank + config.qk_rope_head_dim
    assert {x.shape for x in captured["mla_latent"].values()} == {(batch, width, row)}


def test_attn_res_weights(comparisons):
    """Distributions over depth, far from uniform, one for each mix but the first."""
    case = comparisons("tiny")
    captured = case.found[1]["attn_res_weights"]
    expected = {f"layers.{i}.{kind}_res" for i in range(9) for kind in ("self_attention", "mlp")}
    assert set(captured) == expected - {"layers.0.self_attention_res"} | {"output_attn_res"}
    for weights in captured.values():
        rows = np.concatenate([np.asarray(weights)[b, :n] for b, n in enumerate(LENGTHS)])
        np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-6)  # float32 softmax
        assert (rows >= 0).all() and np.ptp(rows, axis=-1).mean() > 0.05


def test_captures_do_not_change_the_logits(comparisons):
    case = comparisons("micro")
    logits = case.model(case.ids, LENGTHS)
    assert isinstance(logits, jax.Array)
    # The same operations; fusion may differ.
    within(1e-5, logits=case.pairs(logits, lambda result: result.logits))


def test_refused_calls(comparisons):
    model = comparisons("micro").model
    with pytest.raises(ConfigError, match=r"\['attention'\].*prefix_sum"):
        model(np.zeros((1, 3), np.int32), capture=["prefix_sum", "attention"])


def test_without_attn_res_there_is_no_bank(comparisons):
    captured = comparisons("one_expert").found[1]
    assert captured["attn_res_weights"] == {} and captured["block_residuals"] == {}


def test_blocks_of_attention_residuals():
    """F011: five layers in blocks of two. Blocks count layers; the head mixes before the norm."""
    config = MICRO.replace(
        num_hidden_layers=5,
        attn_res_block_size=2,
        linear_attn_config=dataclasses.replace(
            MICRO.linear_attn_config, full_attn_layers=(1, 2, 3, 4, 5), kda_layers=()
        ),
        num_experts=0,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=False,
        quantization_config=None,
    )
    model, ids = random_model(config), np.arange(6, dtype=np.int32)[None]
    captured = jax.tree.map(lambda x: np.asarray(x)[0], model(ids, capture=CAPTURES)[1])
    sources = {name: w.shape[-1] for name, w in captured["attn_res_weights"].items()}
    # The embedding, the sums of closed blocks, and the running sum of the open one.
    assert sources == {
        "layers.0.mlp_res": 2,
        "layers.1.self_attention_res": 2,
        "layers.1.mlp_res": 2,
        "layers.2.self_attention_res": 2,  # the block closes after this mix
        "layers.2.mlp_res": 3,
        "layers.3.self_attention_res": 3,
        "layers.3.mlp_res": 3,
        "layers.4.self_attention_res": 3,
        "layers.4.mlp_res": 4,
        "output_attn_res": 4,
    }
    assert max(sources.values()) == (5 - 1) // 2 + 2
    added = [captured["attn_out"][i] + captured["mlp_out"][i] for i in range(5)]
    bank = np.moveaxis(captured["block_residuals"], 1, 0)
    assert len(bank) == 3
    np.testing.assert_array_equal(bank[0], np.asarray(model.embed_tokens.weight[...])[ids[0]])
    for row, layers in ((1, (0, 1)), (2, (2, 3))):
        within(1e-6, block=(bank[row], added[layers[0]] + added[layers[1]]))
    within(1e-6, open=(captured["prefix_sum"][4], added[4]))

    weights = captured["attn_res_weights"]["output_attn_res"]
    mix = np.einsum("tn,ntd->td", weights, [*bank, captured["prefix_sum"][4]])
    mix /= np.sqrt((mix * mix).mean(-1, keepdims=True) + config.rms_norm_eps)
    within(1e-5, final_norm=(captured["final_norm"], mix * np.asarray(model.norm.weight[...])))


def test_released_block_layout():
    """F011 at the released size: blocks of 12 of 93 layers make 8 rows and at most 9 sources."""
    config = K3Config.preset("k3")
    assert [config.num_bank_rows(layer) for layer in (0, 1, 12, 13, 24, 92, 93)] == [
        *(0, 1, 1, 2, 2, 8, 8)
    ]


# Full size, without memory.


@functools.cache
def stored(preset: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of a checkpoint in the published layout, by name."""
    config = K3Config.preset(preset)
    state = dict(nnx.to_flat_state(nnx.state(K3Model(config), nnx.Param)))
    shapes = {path: variable.get_value().shape for path, variable in state.items()}
    tensors = {}
    for path, source in names.sources(config, shapes, names.published_prefix(config)).items():
        dtype = state[path].get_value().dtype.name
        for name, shape in source.stored.items():
            assert tensors.setdefault(name, (shape, dtype)) == (shape, dtype)
    return tensors


def test_released_checkpoint():
    """Numbers that two readers of the released files assert, less the 168 tensors of vision."""
    tensors = stored("k3")
    assert len(tensors) == 497_220 - 168
    sizes = {"bfloat16": 2, "float32": 4, "uint8": 1}
    total = sum(math.prod(shape) * sizes[dtype] for shape, dtype in tensors.values())
    assert total == 1_559_965_606_912
    layer = "language_model.model.layers"
    expected = {
        "language_model.lm_head.weight": ((163840, 7168), "bfloat16"),
        "language_model.model.output_attn_res_proj.weight": ((1, 7168), "bfloat16"),
        f"{layer}.0.self_attn.A_log": ((128,), "float32"),
        f"{layer}.0.self_attn.v_conv1d.weight": ((12288, 1, 4), "float32"),
        f"{layer}.0.self_attn.f_b_proj.weight": ((12288, 128), "bfloat16"),
        f"{layer}.0.mlp.gate_proj.weight": ((33792, 7168), "bfloat16"),
        f"{layer}.92.self_attn.q_b_proj.weight": ((18432, 1536), "bfloat16"),
        f"{layer}.91.self_attn.kv_b_proj.weight": ((24576, 512), "bfloat16"),
        f"{layer}.91.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "bfloat16"),
        f"{layer}.1.block_sparse_moe.experts.895.w2.weight_packed": ((3584, 1536), "uint8"),
        f"{layer}.1.block_sparse_moe.experts.0.w3.weight_scale": ((3072, 112), "uint8"),
        f"{layer}.1.block_sparse_moe.shared_experts.down_proj.weight": ((7168, 6144), "bfloat16"),
        f"{layer}.1.block_sparse_moe.gate.e_score_correction_bias": ((896,), "float32"),
    }
    assert {name: tensors[name] for name in expected} == expected


def test_four_layer_cut():
    assert len(stored("k3-slice-4l")) == 16_402 - 168
    whole = stored("k3")
    assert all(whole[name] == tensor for name, tensor in stored("k3-slice-4l").items())


def test_kimi_linear_48b():
    tensors = stored("kimi-linear-48b")
    kda, mla, moe = 15, 5, 5 + 256 * 3
    assert len(tensors) == 3 + 27 * 2 + 20 * kda + 7 * mla + 3 + 26 * moe
    layer = "model.layers"
    expected = {
        "model.embed_tokens.weight": ((163840, 2304), "bfloat16"),
        "lm_head.weight": ((163840, 2304), "bfloat16"),
        f"{layer}.0.self_attn.A_log": ((1, 1, 32, 1), "float32"),
        f"{layer}.0.self_attn.g_a_proj.weight": ((128, 2304), "bfloat16"),
        f"{layer}.0.self_attn.g_b_proj.weight": ((4096, 128), "bfloat16"),
        f"{layer}.3.self_attn.q_proj.weight": ((6144, 2304), "bfloat16"),
        f"{layer}.26.block_sparse_moe.experts.255.w1.weight": ((1024, 2304), "bfloat16"),
    }
    assert {name: tensors[name] for name in expected} == expected
    assert not any("_res_" in name or "routed_expert_" in name for name in tensors)


def test_number_of_parameters():
    whole, small = (K3Model(K3Config.preset(name)) for name in ("k3", "kimi-linear-48b"))
    assert whole.num_parameters == pytest.approx(2779.48e9, rel=1e-5)
    assert small.num_parameters == pytest.approx(49e9, rel=0.02)


@pytest.mark.parametrize("preset", ["k3", "tiny-8"])
def test_eight_devices_divide_every_sharded_axis(preset):
    """Laid out for eight devices without an array."""
    model = K3Model(K3Config.preset(preset), mesh=make_mesh(tp=8))
    split = 0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        spec = RULES.spec(variable.get_metadata()["logical_axes"])
        shape = variable.get_value().shape
        for size, axis in zip(shape, spec, strict=True):
            assert axis is None or size % 8 == 0, (path, shape, spec)
        split += any(axis is not None for axis in spec)
    assert split > 100


# Meshes.


def continued(model: K3Model, ids, **options) -> generation.GenerateOutput:
    """STEPS tokens more of the three prompts, greedy without other parameters."""
    fixed = {"lengths": LENGTHS, "max_new_tokens": STEPS, "return_logits": True}
    return generate(model, ids, **fixed, **options)


@pytest.fixture(scope="session")
def micro_greedy(comparisons):
    """Greedy continuation of the micro model's prompts on one device."""
    case = comparisons("micro")
    return continued(case.model, case.ids)


def smallest_gap(logits) -> float:
    ranked = np.sort(logits, axis=-1)
    return float((ranked[..., -1] - ranked[..., -2]).min())


def test_tensor_parallel(comparisons, micro_greedy):
    """Two devices: weights and KDA memory lie split, logits and tokens are those of one."""
    case, mesh = comparisons("micro"), make_mesh(tp=2)
    model = K3Model.from_pretrained(case.folder, mesh=mesh)
    assert len(model.layers[0].self_attn.q_proj.weight[...].addressable_shards) == 2
    logits = model(case.ids, LENGTHS)
    within(3e-4, logits=case.pairs(logits, lambda result: result.logits))

    assert smallest_gap(micro_greedy.logits) > 1e-3  # far above 1e-5, what two orders differ by
    output = continued(model, case.ids)
    np.testing.assert_array_equal(output.token_ids, micro_greedy.token_ids)
    within(3e-4, logits=(output.logits, micro_greedy.logits))
    within(1e-4, state=(output.cache.kda.state, micro_greedy.cache.kda.state))
    within(3e-4, rows=(output.cache.mla.pool, micro_greedy.cache.mla.pool))
    half = output.cache.kda.state.addressable_shards[0].data.shape
    assert half == (1, 3, 2, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("k3_text", 4), ("k3_full_mxfp4", 2), ("k3_sharded", 3)])
def test_tensor_parallel_goldens(name, tp):
    shared = run(name)
    if name == "k3_sharded":  # 160 tokens of vocabulary
        with pytest.raises(ConfigError, match="tp=3 does not divide vocab_size=160"):
            K3Model.from_pretrained(GOLDEN / name, mesh=make_mesh(tp=tp))
        return
    model = K3Model.from_pretrained(GOLDEN / name, dtype="float32", mesh=make_mesh(tp=tp))
    found = shared.parts["golden"]
    logits = model(found.data["input_ids"])
    within(LIMIT[name], logits=(logits, found.data["logits_f64"]))
    output = generate(model, found.data["input_ids"], max_new_tokens=32, return_logits=True)
    np.testing.assert_array_equal(output.token_ids, found.data["greedy_ids"])
    within(LIMIT[name], logits=(output.logits, found.data["greedy_logits"]))


REFUSED_MESHES = {
    "heads": ("kimi_linear", {"tp": 2}, "num_attention_heads=3"),
    "vocabulary": ("k3_text", {"tp": 3}, "vocab_size=160"),
    "kda_heads": ("k3_sharded", {"tp": 2}, "linear_attn_config.num_heads=3"),
    "replicas": ("k3_text", {"dp": 2}, "tp only"),
    "stages": ("k3_text", {"pp": 2, "tp": 2}, "tp only"),
}


@pytest.mark.parametrize("case_name", REFUSED_MESHES)
def test_refused_meshes(case_name):
    name, sizes, message = REFUSED_MESHES[case_name]
    with pytest.raises(ConfigError, match=message):
        K3Model.from_pretrained(GOLDEN / name, mesh=make_mesh(**sizes))


def test_mxfp4_groups_are_not_cut():
    """64 columns are two groups: four devices would share them."""
    config = MICRO.replace(
        num_attention_heads=4,
        linear_attn_config=dataclasses.replace(MICRO.linear_attn_config, num_heads=4),
    )
    with pytest.raises(ConfigError, match=r"tp=4 does not divide moe_intermediate_size / 32=2"):
        K3Model(config, mesh=make_mesh(tp=4))


@pytest.mark.parametrize(
    ("sizes", "message"), [({"tp": 0}, "tp=0"), ({"dp": 4, "tp": 4}, "needs 16 devices")]
)
def test_impossible_meshes(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(**sizes)


def test_two_models_in_one_process(comparisons, micro_greedy):
    """F079: another dtype and mesh beside the first model, built, used, deleted and built again."""
    case, mesh = comparisons("micro"), make_mesh(tp=2)
    before = np.asarray(case.model(case.ids, LENGTHS))
    for _ in range(2):
        other = K3Model.from_pretrained(case.folder, dtype="bfloat16", mesh=mesh)
        split = K3Model.from_pretrained(case.folder, mesh=mesh)
        assert jax.sharding.get_abstract_mesh().empty
        np.testing.assert_array_equal(case.model(case.ids, LENGTHS), before)
        within(3e-4, split=case.pairs(split(case.ids, LENGTHS), lambda r: r.logits))
        assert (other.dtype, split.dtype, case.model.dtype) == ("bfloat16", "float32", "float32")
        assert case.model.mesh is None and other.mesh is split.mesh is mesh
        del other, split
    again = continued(case.model, case.ids)
    np.testing.assert_array_equal(again.token_ids, micro_greedy.token_ids)


# F085: 64-bit numbers.


def decode_jaxpr(model: K3Model) -> str:
    graphdef, state = nnx.split(model)
    one = jnp.ones(3, jnp.int32)
    params = SamplingParams(temperature=np.float64(0.7), top_p=0.9)
    sampling = generation.sampling_state([params] * 3, [[1]] * 3, model.config.vocab_size)
    cache = generation.new_cache(model, 3, 22)
    progress = generation.Progress(cache, one, one, one, sampling, jnp.ones(3, bool))
    return str(
        generation.decode.trace(
            graphdef,
            state,
            progress,
            jnp.int32(4),
            capacity=STEPS - 1,
            keep_logits=True,
        ).jaxpr
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_wide_floats_in_the_decode_step(comparisons, dtype):
    """Under x64 too. Python's own numbers are float64 scalars until they meet an array."""
    model = K3Model.from_pretrained(comparisons("micro").folder, dtype=dtype)
    with jax.enable_x64(True):
        text = decode_jaxpr(model)
    assert "f32[3" in text and not re.search(r"\bf64\[\d", text)


def test_tokens_do_not_depend_on_x64(comparisons, micro_greedy):
    case = comparisons("micro")
    warm = {"temperature": np.float64(0.9), "top_k": np.int64(9), "min_p": np.float32(0.01)}
    drawn = [SamplingParams(seed=np.int64(b), **warm) for b in range(3)]
    expected = continued(case.model, case.ids, params=drawn)
    with jax.enable_x64(True):
        greedy = continued(case.model, case.ids.astype(np.int64))
        sampled = continued(case.model, case.ids, params=drawn)
    np.testing.assert_array_equal(greedy.token_ids, micro_greedy.token_ids)
    np.testing.assert_array_equal(sampled.token_ids, expected.token_ids)
    kinds = jax.tree.map(lambda x: x.dtype, (micro_greedy.cache, micro_greedy.logits))
    assert jax.tree.map(lambda x: x.dtype, (greedy.cache, greedy.logits)) == kinds
    assert greedy.token_ids.dtype == np.int32


def test_float16_checkpoints_are_held_in_float32():
    config = K3Config.preset("tiny").replace(dtype="float16")
    assert K3Model(config).dtype == jnp.float32
    assert K3Model(config, dtype="bfloat16").dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match="float16"):
        K3Model(config, dtype="float16")


BAD_CALLS = {
    "negative": ([[1, -1, 3]], None, "input_ids"),
    "too_large": ([[1, 64, 3]], None, "input_ids"),
    "floats": ([[1.5, 2.0]], None, "input_ids"),
    "booleans": ([[True, False]], None, "input_ids"),
    "empty": ([[]], None, "input_ids"),
    "flat": ([1, 2], None, "input_ids"),
    "ragged": ([[1, 2], [3]], None, "input_ids"),
    "length_0": ([[1, 2, 3]], [0], "lengths"),
    "length_too_long": ([[1, 2, 3]], [4], "lengths"),
    "length_of_a_half": ([[1, 2, 3]], [1.5], "lengths"),
    "lengths_of_others": ([[1, 2, 3]], [1, 2], "lengths"),
}


@pytest.mark.parametrize("call", [K3Model.__call__, generate], ids=["model", "generate"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_refused_prompts(case, call):
    ids, lengths, field = BAD_CALLS[case]
    options = {"max_new_tokens": 2} if call is generate else {}
    with pytest.raises(RequestError) as caught:
        call(random_model(MICRO), ids, lengths=lengths, **options)
    assert caught.value.field == field


def test_a_model_without_weights_says_so():
    for call in (K3Model.__call__, functools.partial(generate, max_new_tokens=1)):
        with pytest.raises(ConfigError, match="no weights"):
            call(K3Model(MICRO), [[1, 2]])


def test_checkpoints_inside_a_prefill():
    """Snapshots on the way equal the memory of a prefill that ends there, and split nothing."""
    model = random_model(MICRO)
    tokens = np.random.default_rng(0).integers(0, MICRO.vocab_size, 150).astype(np.int32)
    table = jnp.arange(3, dtype=jnp.int32)[None]

    def run(length, checkpoints=None):
        cache = allocate_cache(MICRO, num_slots=4, num_pages=3, page_size=64, dtype=jnp.float32)
        lens = jnp.asarray([length], jnp.int32)
        rows = PrefillRows(
            Segments.rectangle(1, 150, lens),
            slots=jnp.asarray([1], jnp.int32),
            page_table=table,
            checkpoints=checkpoints,
        )
        return jax.jit(lambda batch, cache: model.step(jnp.asarray(tokens), batch, cache)[1])(
            Batch(prefill=rows), cache
        ).kda

    wanted = Checkpoints(*(jnp.asarray(x, jnp.int32) for x in ((0, 0), (64, 128), (2, 3))))
    taken, plain = run(150, wanted), run(150)
    for field in dataclasses.fields(taken):
        pool = getattr(taken, field.name)
        np.testing.assert_array_equal(pool[:, 1], getattr(plain, field.name)[:, 1])
        for slot, length in ((2, 64), (3, 128)):
            np.testing.assert_allclose(
                pool[:, slot], getattr(run(length), field.name)[:, 1], rtol=1e-6, atol=1e-6
            )
