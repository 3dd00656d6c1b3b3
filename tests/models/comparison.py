"""Random models beside the float64 oracle."""

import dataclasses
import functools

import numpy as np

from k3jax import K3Config, K3Model
from k3jax.checkpoint.tiny import random_model
from k3jax.models.k3 import CAPTURES
from tests.oracle.k3_numpy import K3, Result

# Tokens of three prompts, right-padded to 12: one shape for most calls, so few programs.
LENGTHS = np.asarray((12, 5, 9), np.int32)


@dataclasses.dataclass
class Comparison:
    """One random model, three random prompts, and what both programs say about them."""

    config: K3Config
    folder: str
    model: K3Model
    ids: np.ndarray
    expected: list[Result]

    @functools.cached_property
    def found(self):
        return self.model(self.ids, LENGTHS, capture=CAPTURES)

    def pairs(self, got, of) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of `got` [B, T, ...], and the oracle's `of(result)`, one after another."""
        rows = [np.asarray(got)[row, :length] for row, length in enumerate(LENGTHS)]
        return np.concatenate(rows), np.concatenate([of(result) for result in self.expected])


def compare(config: K3Config, folder) -> Comparison:
    """Random weights of `config`, written to `folder`, in both programs."""
    random_model(config).save_pretrained(folder)
    oracle, model = K3(folder), K3Model.from_pretrained(folder, dtype="float32")
    for seed in range(50):  # the first prompts that no expert's choice is a near tie of
        ids = np.random.default_rng(seed).integers(0, config.vocab_size, (3, 12), np.int32)
        expected = [oracle(row[:length]) for row, length in zip(ids, LENGTHS, strict=True)]
        if min(result.router_gap for result in expected) > 2e-5:
            return Comparison(config, str(folder), model, ids, expected)
    raise AssertionError("every seed has a near tie")
