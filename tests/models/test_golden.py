"""The model against reference numbers that independent code computed."""

import dataclasses

import numpy as np
import pytest

from k3jax.models.k3 import CAPTURES
from tests.models.golden_runs import (
    CASES,
    CHUNK,
    GOLDEN,
    LIMIT,
    SETS,
    STATE_LIMIT,
    cached_latents,
    check_bfloat16,
    run,
    within,
)
from tests.oracle.k3_numpy import golden_error

LONG = [name for name, parts in SETS.items() if "golden_long" in parts]
# What takes long to compile and has no feature that the other sets lack.
FORWARD = [
    pytest.param(*case, marks=pytest.mark.slow) if case[0] == "k3_bf16" else case for case in CASES
]


def holding(*kinds: str) -> list:
    """The cases whose file has arrays of one of these kinds; not every file has all."""
    kept = []
    for case in CASES:
        with np.load(GOLDEN / case[0] / f"{case[1]}.npz") as file:
            if any(name.split(".")[-1] in kinds for name in file.files):
                kept.append(case)
    return [
        pytest.param(*case, marks=pytest.mark.slow) if case[0] == "k3_bf16" else case
        for case in kept
    ]


GREEDY = [
    pytest.param(*case, marks=pytest.mark.slow) if case[0] in ("k3_bf16", "k3_sharded") else case
    for case in CASES
    if case != ("kimi_linear", "golden_long")  # holds no continuation
]


def conv_states(memory, layer=None, rows=slice(None)) -> dict[str, np.ndarray]:
    """{"q": [rows, W - 1, channels], ...} of a KDACache, or of one layer of a pool."""
    tails = {"q": memory.conv_q, "k": memory.conv_k, "v": memory.conv_v}
    picked = {k: np.asarray(v if layer is None else v[layer])[rows] for k, v in tails.items()}
    return {k: v.reshape(*v.shape[:2], -1) for k, v in picked.items()}


def pool_against(data, prefix: str, cache, kda_layers, rows) -> dict:
    """(got, reference) pairs of the KDA pools and the golden arrays `prefix`layers.N.*."""
    pairs = {}
    for place, layer in enumerate(kda_layers):
        name = f"{prefix}layers.{layer}"
        pairs[f"{name}.kda_state"] = (
            np.asarray(cache.kda.state[place])[rows],
            data[f"{name}.kda_state"],
        )
        for kind, tail in conv_states(cache.kda, place, rows).items():
            pairs[f"{name}.conv_state_{kind}"] = (tail, data[f"{name}.conv_state_{kind}"])
    return pairs


def layers_of(model, kind: str) -> list[int]:
    return [layer for layer, found in enumerate(model.config.layer_types) if found == kind]


@pytest.mark.parametrize("name", SETS)
def test_oracle_reproduces_the_goldens(golden, name):
    # The references of kimi_linear are float32 themselves.
    assert golden_error(golden / name) < (5e-6 if name == "kimi_linear" else 1e-7)


@pytest.mark.parametrize(("name", "part"), FORWARD)
def test_logits(name, part):
    found, logits = run(name).parts[part], run(name).forward[0]
    key = "logits_f64" if "logits_f64" in found.data else "logits"
    within(LIMIT[name], logits=(found.join(logits), found.reference(key)))


@pytest.mark.parametrize(("name", "part"), holding("final_norm", "out"))
def test_hidden_states(name, part):
    found, captured = run(name).parts[part], run(name).forward[1]
    names = {"out": "prefix_sum", "attn_out": "attn_out", "mlp_out": "mlp_out"}
    pairs = {
        f"layers.{layer}.{golden_name}": value
        for golden_name, capture in names.items()
        for layer, value in captured[capture].items()
    }
    pairs |= {
        "final_norm": captured["final_norm"],
        "block_residual": captured["block_residuals"],
    }
    within(
        LIMIT[name],
        **{k: (found.join(v), found.reference(k)) for k, v in pairs.items() if k in found.data},
    )


def test_nothing_of_the_main_goldens_is_left_out():
    """Every kind of array in k3_text is compared by one of the tests here."""
    kinds = {key.split(".")[-1] for key in run("k3_text").parts["golden"].data}
    states = {"kda_state", "conv_state_q", "conv_state_k", "conv_state_v"}
    tokens = {"out", "attn_out", "mlp_out", "final_norm", "block_residual", "logits", "logits_f64"}
    other = {"router_indices", "router_weights", "mla_c_kv", "mla_k_rot"}
    inputs_and_answers = {"input_ids", "greedy_ids", "greedy_logits"}
    assert kinds == states | tokens | other | inputs_and_answers


@pytest.mark.parametrize(("name", "part"), holding("router_indices"))
def test_router(name, part):
    found, captured = run(name).parts[part], run(name).forward[1]
    pairs = {}
    for layer, (ids, weights) in captured["router"].items():
        key = f"layers.{layer}.router_indices"
        if key not in found.data:
            continue
        ids, weights = found.join(ids), found.join(weights)
        order = np.argsort(ids, axis=-1)  # the goldens are sorted by expert
        np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), found.reference(key))
        reference = found.reference(f"layers.{layer}.router_weights")
        pairs[f"layer {layer}"] = np.take_along_axis(weights, order, -1), reference
    within(1e-4, **pairs)


@pytest.mark.parametrize(("name", "part"), holding("kda_state"))
def test_kda_memory_after_the_prompt(name, part):
    found, captured = run(name).parts[part], run(name).forward[1]
    states = {}
    for layer, memory in captured["kda_state"].items():
        key = f"layers.{layer}."
        state = np.asarray(memory.state)[found.rows]
        states[key + "kda_state"] = state, found.data[key + "kda_state"]
        for kind, tail in conv_states(memory, rows=found.rows).items():
            states[f"{key}conv_state_{kind}"] = tail, found.data[f"{key}conv_state_{kind}"]
    within(STATE_LIMIT[name], **states)


@pytest.mark.parametrize(("name", "part"), holding("mla_c_kv"))
def test_mla_latents_of_the_prompt(name, part):
    found, captured = run(name).parts[part], run(name).forward[1]
    latents = {}
    for layer, rows in captured["mla_latent"].items():
        key = f"layers.{layer}."
        latent, shared = (found.reference(key + kind) for kind in ("mla_c_kv", "mla_k_rot"))
        rows = found.join(rows)
        latents[key + "mla_c_kv"] = rows[:, : latent.shape[1]], latent
        latents[key + "mla_k_rot"] = rows[:, latent.shape[1] :], shared
    within(LIMIT[name], **latents)


@pytest.mark.parametrize(("name", "part"), GREEDY)
def test_greedy(name, part):
    found, output = run(name).parts[part], run(name).greedy
    steps = found.data["greedy_ids"].shape[1]
    np.testing.assert_array_equal(output.token_ids[found.rows, :steps], found.data["greedy_ids"])
    if "greedy_logits" in found.data:
        got = output.logits[found.rows, :steps]
        within(LIMIT[name], logits=(got, found.data["greedy_logits"]))


@pytest.mark.parametrize(
    "name", ["k3_text", pytest.param("k3_sharded", marks=pytest.mark.slow), "k3_full_mxfp4"]
)
def test_memory_after_greedy(name):
    found, cache = run(name).parts["golden"], run(name).greedy.cache
    kda = layers_of(run(name).model, "kda")
    within(STATE_LIMIT[name], **pool_against(found.data, "after_greedy.", cache, kda, found.rows))


SPLITS = {  # places at which a prompt of 300 tokens is cut
    "every_64": [*range(64, 300, 64), 300],
    # Those of golden_long, which holds memory at 64, 100, 128, 192 and 256, among others.
    "odd_places": [1, 3, 64, 65, 100, 128, 191, 192, 255, 256, 299, 300],
}


@pytest.mark.parametrize("cuts", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("name", LONG)
def test_split_prefill_equals_unsplit(name, cuts):
    """Memory and logits at every cut, against one pass over the whole prompt and the goldens."""
    model = run(name).model
    found = run(name).parts["golden_long"]
    row, length = found.rows.start, found.lengths[0]
    kda, mla = layers_of(model, "kda"), layers_of(model, "mla")
    cuts = [*(cut for cut in cuts if cut < length), length]
    for cut, cache, logits in run(name).pieces(cuts):
        at = {"logits": (logits[row], found.data["logits"][0, cut - 1])}
        for place, layer in enumerate(mla):
            latent, shared = (found.data[f"layers.{layer}.mla_{k}"][0] for k in ("c_kv", "k_rot"))
            rows = cached_latents(cache, place, row, cut)
            at[f"layers.{layer}.mla_c_kv"] = rows[:, : latent.shape[1]], latent[:cut]
            at[f"layers.{layer}.mla_k_rot"] = rows[:, latent.shape[1] :], shared[:cut]
        within(LIMIT[name], **at)
        prefix = "" if cut == length else f"at{cut}."
        if f"{prefix}layers.0.kda_state" in found.data:
            pairs = pool_against(found.data, prefix, cache, kda, found.rows)
            within(STATE_LIMIT[name], **pairs)
    # The shorter prompts of the batch ended in earlier pieces and kept their memory.
    whole = run(name).forward[1]["kda_state"]
    for place, layer in enumerate(kda):
        within(STATE_LIMIT[name], state=(cache.kda.state[place], whole[layer].state))


def test_padding_does_not_matter():
    """Other tokens behind the ends of rows change no bit of what stands before them."""
    name = "k3_full_mxfp4"
    shared = run(name)
    other = shared.padded_ids(seed=1)
    assert (other != shared.ids).any()
    logits, captured = shared.model(other, shared.lengths, capture=CAPTURES)
    for part in shared.parts.values():
        np.testing.assert_array_equal(part.join(logits), part.join(shared.forward[0]))
    for layer, memory in captured["kda_state"].items():
        for field in dataclasses.fields(memory):
            expected = getattr(shared.forward[1]["kda_state"][layer], field.name)
            np.testing.assert_array_equal(getattr(memory, field.name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k3_full_mxfp4", "kimi_linear"])
def test_batch_of_one_equals_a_row(name):
    found, together = run(name).parts["golden"], run(name).forward[0]
    alone = run(name).model(found.data["input_ids"][:1])[0]
    # Another shape of batch sums in another order.
    within(LIMIT[name], logits=(alone, found.tokens(together, 0)))


def test_bfloat16():
    check_bfloat16()


def test_chunks_are_shorter_than_the_long_prompts():
    assert all(run(name).parts["golden_long"].lengths[0] > 2 * CHUNK for name in LONG)
