"""Whole sublayers against the goldens: prefill, decode through the caches, and mixtures of both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config, LinearAttentionConfig
from k3jax.models.attn_res import AttnRes
from k3jax.models.cache import Batch, DecodeRows, LatentCache, PrefillRows
from k3jax.models.kda import KDA
from k3jax.models.mla import MLA
from k3jax.models.moe import LatentMoE
from pallas_kernels.common.functions import decay_gate, l2_normalize
from pallas_kernels.common.segments import Segments
from pallas_kernels.kda_decode import KDACache
from pallas_kernels.short_conv import short_conv
from tests.kernels.oracle import assert_close

LIMIT, CHUNKED = 1e-5, 2e-5
PAGE = 4


def config(**changes):
    """The tiny preset at the goldens' width of 64."""
    tiny = K3Config.preset("tiny")
    linear = LinearAttentionConfig(
        4,
        16,
        tiny.linear_attn_config.kda_layers,
        tiny.linear_attn_config.full_attn_layers,
        use_full_rank_gate=True,
        gate_lower_bound=-5.0,
    )
    common = {"hidden_size": 64, "vision_config": None, "linear_attn_config": linear}
    return tiny.replace(**common, **changes)


def fill(module, values):
    """Sets parameters by dotted path."""
    for path, value in values.items():
        parameter = functools.reduce(getattr, path.split("."), module)
        parameter.set_value(jnp.asarray(value).reshape(parameter.get_value().shape))
    return module


def under(z, prefix):
    return {name.removeprefix(prefix): z[name] for name in z.files if name.startswith(prefix)}


def no_tap(name, value, **where):
    pass


class Taps(dict):
    def __call__(self, name, value, **where):
        self[name] = value()


def rows(x):
    return jnp.asarray(x.reshape(-1, x.shape[-1]))


def vector(*values):
    return jnp.asarray(values, jnp.int32)


def active(*values):
    return jnp.asarray(values, bool)


NO_PAGES = jnp.zeros((2, 1), jnp.int32)


# MLA.

MLA_CASES = ["qlora_gated", "noqlora_ungated", "qlora_gated_h6"]


@functools.cache
def mla(path, case):
    """The golden's arrays, and the jitted sublayer with its weights."""
    z = under(np.load(path / "ops/mla.npz"), f"{case}.")
    heads, nope, rank = (int(z[n]) for n in ("num_heads", "qk_nope_head_dim", "kv_lora_rank"))
    weights = {name.removeprefix("w."): z[name] for name in z if name.startswith("w.")}
    q_a = weights.get("q_a_proj.weight")
    module = MLA(
        config(
            num_attention_heads=heads,
            q_lora_rank=None if q_a is None else q_a.shape[0],
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=int(z["qk_rope_head_dim"]),
            v_head_dim=int(z["v_head_dim"]),
            mla_use_output_gate="g_proj.weight" in weights,
        ),
        jnp.float32,
    )
    up = weights.pop("kv_b_proj.weight").reshape(heads, -1, rank)
    fill(module, weights | {"k_up": up[:, :nope], "v_up": up[:, nope:]})

    @functools.partial(jax.jit, static_argnames="keeps")
    def run(x, batch, pool, keeps=True):
        taps = Taps()
        cache = LatentCache(pool, jnp.ones(2, jnp.float32)) if keeps else None
        y, cache = module(x, batch, cache, 1, taps)
        return y, cache.pool if keeps else None, dict(taps)

    return z, run


def mla_pool(z, tokens):
    """An empty pool of two layers, pages of the sequences interleaved; NaN where nothing is."""
    width = z["c_kv"].shape[-1] + z["k_rot"].shape[-1]
    pages = -(-tokens // PAGE)
    table = jnp.arange(2 * pages, dtype=jnp.int32).reshape(pages, 2).T
    return jnp.full((2, 2 * pages, PAGE, width), jnp.nan, jnp.float32), table


def check_mla(path, case):
    z, run = mla(path, case)
    tokens = z["x"].shape[1]
    latent = np.concatenate([z["c_kv"], z["k_rot"]], axis=-1)

    y, _, taps = run(
        rows(z["x"]), Batch(prefill=PrefillRows(Segments.rectangle(2, tokens))), None, keeps=False
    )
    assert_close(y, rows(z["y"]), LIMIT, "prefill")
    assert_close(taps["mla_latent"], rows(latent), LIMIT, "latent")

    pool, table = mla_pool(z, tokens)
    for t in range(tokens):
        one = Batch(DecodeRows(vector(t, t), active(1, 1), table))
        y, pool, _ = run(jnp.asarray(z["x"][:, t]), one, pool)
        assert_close(y, z["y"][:, t], LIMIT, f"decode {t}")
    cached = pool[1, table].reshape(2, -1, pool.shape[-1])
    assert_close(cached[:, :tokens], latent, LIMIT, "cache")
    assert np.all(np.isnan(pool[0])), "another layer was written to"


@pytest.mark.parametrize("case", MLA_CASES)
def test_mla(golden, case):
    check_mla(golden, case)


def test_mla_in_pieces(golden):
    """Prefill, prefill behind a context, an idle sequence in a decode step, then the last token."""
    z, run = mla(golden, "qlora_gated")
    tokens = z["x"].shape[1]
    pool, table = mla_pool(z, tokens)
    outputs = np.full(z["y"].shape, np.nan)

    def prefill(pool, done, lens):
        segments = Segments(vector(0, lens[0]), vector(*lens))
        batch = Batch(prefill=PrefillRows(segments, vector(*done), page_table=table))
        x = np.full((20, 64), np.nan, np.float32)  # padded with poison
        x[: sum(lens)] = np.concatenate([z["x"][b, done[b] :][: lens[b]] for b in (0, 1)])
        y, pool, _ = run(jnp.asarray(x), batch, pool)
        outputs[0, done[0] : done[0] + lens[0]] = y[: lens[0]]
        outputs[1, done[1] : done[1] + lens[1]] = y[lens[0] : sum(lens)]
        return pool

    pool = prefill(pool, (0, 0), (7, 9))
    pool = prefill(pool, (7, 9), (11, 8))
    batch = Batch(DecodeRows(vector(18, 17), active(0, 1), table))
    y, pool, _ = run(jnp.asarray(z["x"][[0, 1], [18, 17]]), batch, pool)
    outputs[1, 17] = y[1]
    batch = Batch(DecodeRows(vector(18, 18), active(1, 1), table))
    y, pool, _ = run(jnp.asarray(z["x"][:, 18]), batch, pool)
    outputs[:, 18] = y
    assert_close(outputs, z["y"], LIMIT)


# KDA.


@functools.cache
def kda(path):
    z = np.load(path / "ops/kda_layer.npz")
    module = fill(KDA(config(), jnp.float32), under(z, "w."))
    run = jax.jit(lambda x, batch, cache: module(x, batch, cache, 1, no_tap))
    return z, module, run


def kda_cache(slots=3):
    """Two layers; a sequence that starts does not mind what its slot held."""
    return KDACache(
        jnp.full((2, slots, 4, 16, 16), jnp.nan, jnp.float32),
        *(jnp.full((2, slots, 3, 4, 16), jnp.nan, jnp.float32) for _ in range(3)),
    )


def check_kda_memory(z, cache, slots, limit):
    assert_close(cache.state[1, slots], z["final_state"], limit, "state")
    for name in "qkv":
        tail = getattr(cache, f"conv_{name}")[1, slots]
        assert_close(tail, z[f"conv_state_{name}"].reshape(tail.shape), LIMIT, f"conv_{name}")
    assert np.all(np.isnan(cache.state[0])), "another layer was written to"


def check_kda(path, cut):
    """A prefill of `cut` tokens into scattered slots, then one by one."""
    z, _, run = kda(path)
    tokens, slots = z["x"].shape[1], vector(2, 0)
    segments = Segments.rectangle(2, tokens, vector(cut, cut))
    y, cache = run(
        rows(z["x"]), Batch(prefill=PrefillRows(segments, vector(0, 0), slots)), kda_cache()
    )
    y = y.reshape(2, tokens, -1)
    assert_close(y[:, :cut], z["y"][:, :cut], CHUNKED, "prefill")
    for t in range(cut, tokens):
        batch = Batch(DecodeRows(vector(t, t), active(1, 1), NO_PAGES, slots))
        y, cache = run(jnp.asarray(z["x"][:, t]), batch, cache)
        assert_close(y, z["y"][:, t], CHUNKED, f"decode {t}")
    check_kda_memory(z, cache, slots, CHUNKED)
    assert np.all(np.isnan(cache.state[1, 1])), "a slot of nobody was written to"


@pytest.mark.parametrize("cut", [1, 33, 75])
def test_kda(golden, cut):
    check_kda(golden, cut)


def test_kda_in_two_prefills(golden):
    """The tails and the state carry over, also where the second call has less than a tail."""
    z, _, run = kda(golden)
    slots, cache, done = vector(2, 0), kda_cache(), 0
    outputs = []
    for count in (64, 2, 9):
        x = np.full((2, 75, 64), np.nan, np.float32)
        x[:, :count] = z["x"][:, done : done + count]
        segments = Segments.rectangle(2, 75, vector(count, count))
        y, cache = run(
            rows(x), Batch(prefill=PrefillRows(segments, vector(done, done), slots)), cache
        )
        outputs.append(y.reshape(2, 75, -1)[:, :count])
        done += count
    assert_close(np.concatenate(outputs, axis=1), z["y"], CHUNKED)
    check_kda_memory(z, cache, slots, CHUNKED)


def test_what_the_kda_kernel_sees(golden):
    z, module, _ = kda(golden)
    tokens = z["x"].shape[1]

    @jax.jit
    def inputs(x):
        def heads(y):
            return y.reshape(-1, 4, 16)

        tail, segments = jnp.zeros((2, 3, 4, 16), jnp.float32), Segments.rectangle(2, tokens)
        out = {
            name: short_conv(
                heads(getattr(module, f"{name}_proj")(x)),
                getattr(module, f"{name}_conv1d").weight[...],
                tail,
                segments,
            )
            for name in "qkv"
        }
        out |= {name: l2_normalize(out[name]) for name in "qk"}
        f = heads(module.f_b_proj(module.f_a_proj(x)))
        out["g"] = decay_gate(f, module.A_log[...], module.dt_bias[...], -5.0)
        out["beta"] = jax.nn.sigmoid(module.b_proj(x))
        return out

    for name, value in inputs(rows(z["x"])).items():
        expected = z[f"kernel_in.{name}"]
        assert_close(value.reshape(expected.shape), expected, LIMIT, name)


# The rest.


@functools.cache
def latent_moe(path):
    z = np.load(path / "ops/latent_moe.npz")
    weights = under(z, "w.")
    # Stored [E, in, gate | up] and [E, F, out]; here [E, 2, F, in] and [E, out, F].
    up, down = (weights.pop(f"experts.{n}_projs") for n in ("gate_and_up", "down"))
    count, dim, both = up.shape
    weights["experts.gate_up"] = np.swapaxes(up, 1, 2).reshape(count, 2, both // 2, dim)
    weights["experts.down"] = np.swapaxes(down, 1, 2)
    module = LatentMoE(
        config(
            num_experts=count,
            num_experts_per_token=z["router_indices"].shape[1],
            moe_intermediate_size=both // 2,
            routed_expert_hidden_size=dim,
            routed_scaling_factor=float(z["routed_scaling_factor"]),
            quantization_config=None,
        ),
        jnp.float32,
    )
    return z, fill(module, weights)


def check_latent_moe(path, implementation):
    z, module = latent_moe(path)
    module.implementation = implementation

    @jax.jit
    def run(x):
        taps = Taps()
        return module(x, taps), taps["router"]

    y, (ids, weights) = run(rows(z["x"]))
    assert_close(y, rows(z["y"]), LIMIT)
    by_id = np.argsort(ids, axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(ids), by_id, 1), z["router_indices"]
    )
    assert_close(np.take_along_axis(np.asarray(weights), by_id, 1), z["router_weights"], LIMIT)


@pytest.mark.parametrize("implementation", ["gathered", "sorted_loop", "ragged", "reference"])
def test_latent_moe(golden, implementation):
    check_latent_moe(golden, implementation)


def check_attn_res(path):
    z = np.load(path / "ops/attn_res.npz")
    module = AttnRes(64, eps=float(z["eps"]), dtype=jnp.float32)
    fill(module, {"norm": z["norm_weight"], "proj": z["proj_weight"]})
    bank = jnp.asarray(np.moveaxis(z["n3.block_residual"], 1, 0))
    out, probs = module(bank, jnp.asarray(z["n3.prefix_sum"]))
    assert_close(out, z["n3.out"], LIMIT)
    assert_close(probs, z["n3.probs"], LIMIT)


def test_attn_res(golden):
    check_attn_res(golden)


@pytest.mark.gpu
def test_golden_on_this_device(golden):
    for case in MLA_CASES:
        check_mla(golden, case)
    check_kda(golden, 33)
    for implementation in ("gathered", "sorted_loop", "ragged"):
        check_latent_moe(golden, implementation)
    check_attn_res(golden)
