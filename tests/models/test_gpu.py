"""The golden and tiny models on a GPU; `make test-gpu` runs these."""

import numpy as np
import pytest

from k3jax import K3Config, generate
from tests.models.comparison import compare
from tests.models.golden_runs import LIMIT, check_bfloat16, run, within

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["k3_text", "k3_full_mxfp4", "kimi_linear"])
def test_golden_logits(name):
    found, model = run(name).parts["golden"], run(name).model
    key = "logits_f64" if "logits_f64" in found.data else "logits"
    within(LIMIT[name], logits=(model(found.data["input_ids"]), found.data[key]))


@pytest.mark.parametrize("name", ["k3_text", "k3_full_mxfp4", "kimi_linear"])
def test_golden_greedy(name):
    found, model = run(name).parts["golden"], run(name).model
    output = generate(model, found.data["input_ids"], max_new_tokens=32, return_logits=True)
    np.testing.assert_array_equal(output.token_ids, found.data["greedy_ids"])
    within(LIMIT[name], logits=(output.logits, found.data["greedy_logits"]))


def test_bfloat16():
    check_bfloat16()


def test_tiny_equals_the_oracle(tmp_path):
    case = compare(K3Config.preset("tiny"), tmp_path)
    within(3e-4, logits=case.pairs(case.found[0], lambda result: result.logits))
    for layer, memory in case.found[1]["kda_state"].items():
        states = np.stack([result.states[layer] for result in case.expected])
        within(1e-4, state=(memory.state, states))
