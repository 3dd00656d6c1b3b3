"""Golden checkpoints run once a session: every prompt of a folder as one row of one padded batch.

So a model's forward pass, prefill and decode are compiled once each, whatever is compared.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax import K3Config, K3Model, generation
from k3jax.models.k3 import CAPTURES
from tests.oracle.k3_numpy import K3

GOLDEN = Path(__file__).parents[1] / "golden"
CHUNK = 64  # tokens that the prefill program takes at a time
SETS = {  # folder -> its files of prompts
    "k3_text": ("golden", "golden_ragged", "golden_long"),
    "k3_sharded": ("golden", "golden_ragged"),
    "k3_full_mxfp4": ("golden", "golden_ragged"),
    "k3_bf16": ("golden",),
    "kimi_linear": ("golden", "golden_ragged", "golden_long"),
}
CASES = [(name, part) for name, parts in SETS.items() for part in parts]
# Two orders of evaluating these models in float32 differ by up to 6e-5 of the largest logit.
LIMIT = {name: 5e-5 if name == "kimi_linear" else 3e-4 for name in SETS}
STATE_LIMIT = {name: 5e-5 if name == "kimi_linear" else 1e-4 for name in SETS}


def relative_error(got, reference) -> float:
    """max |got - reference| / max |reference|."""
    got, reference = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    assert got.shape == reference.shape, (got.shape, reference.shape)
    assert np.isfinite(got).all()
    return float(np.abs(got - reference).max() / np.abs(reference).max())


def within(limit: float, **pairs) -> None:
    """Asserts every named (got, reference) pair and names all that fail."""
    assert pairs, "nothing was compared"
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= limit}
    assert not wrong, f"above {limit:.0e}: {wrong}"


@dataclass(frozen=True)
class Part:
    """The prompts of one .npz file and which rows of the batch they are."""

    data: dict[str, np.ndarray]
    rows: slice
    lengths: np.ndarray

    def tokens(self, batched, row: int):
        """Row `row` of this part without its padding; `batched` covers the whole batch."""
        return np.asarray(batched)[self.rows.start + row, : self.lengths[row]]

    def join(self, batched) -> np.ndarray:
        """All tokens of the part, one after another: [sum of lengths, ...]."""
        return np.concatenate([self.tokens(batched, row) for row in range(len(self.lengths))])

    def reference(self, name: str) -> np.ndarray:
        """A golden array [rows, T, ...] in the order of `join`."""
        pairs = zip(self.data[name], self.lengths, strict=True)
        return np.concatenate([row[:length] for row, length in pairs])


@dataclass
class Run:
    """A golden model and what it makes of all prompts of its folder."""

    name: str
    dtype: str = "float32"
    parts: dict[str, Part] = field(init=False)
    ids: np.ndarray = field(init=False)  # [B, T], right-padded with arbitrary tokens
    lengths: np.ndarray = field(init=False)

    def __post_init__(self):
        self.parts, first = {}, 0
        for part in SETS[self.name]:
            with np.load(GOLDEN / self.name / f"{part}.npz") as file:
                data = dict(file)
            count, width = data["input_ids"].shape
            lengths = data.get("lengths", np.full(count, width))
            self.parts[part] = Part(data, slice(first, first + count), lengths)
            first += count
        self.lengths = np.concatenate([part.lengths for part in self.parts.values()])
        self.ids = self.padded_ids(seed=0)

    def padded_ids(self, seed: int) -> np.ndarray:
        """The batch, with padding drawn from `seed`: it must not matter."""
        vocab = K3Config.from_pretrained(GOLDEN / self.name).vocab_size
        shape = (len(self.lengths), self.lengths.max())
        ids = np.random.default_rng(seed).integers(0, vocab, shape, np.int32)
        for part in self.parts.values():
            for row, length in enumerate(part.lengths):
                ids[part.rows.start + row, :length] = part.data["input_ids"][row, :length]
        return ids

    @functools.cached_property
    def model(self) -> K3Model:
        return K3Model.from_pretrained(GOLDEN / self.name, dtype=self.dtype)

    @functools.cached_property
    def forward(self) -> tuple[jax.Array, dict]:
        """Logits and all captures."""
        return self.model(self.ids, self.lengths, capture=CAPTURES)

    @property
    def longest_answer(self) -> int:
        return max(part.data["greedy_ids"].shape[1] for part in self.with_greedy.values())

    @property
    def with_greedy(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if "greedy_ids" in part.data}

    @functools.cached_property
    def greedy(self) -> generation.GenerateOutput:
        """Greedy continuation of all prompts; long ones go in by pieces of CHUNK tokens."""
        return generation.generate(
            self.model,
            self.ids,
            lengths=self.lengths,
            max_new_tokens=self.longest_answer,
            prefill_chunk=CHUNK if "golden_long" in self.parts else None,
            return_logits=True,
        )

    def pieces(self, cuts):
        """Feeds every prompt up to each of `cuts`; yields (cut, cache, logits of the last tokens).

        Uses the program that `greedy` compiled. A cut at most CHUNK after the one before.
        """
        graphdef, state = nnx.split(self.model)
        batch = len(self.lengths)
        cache = generation.new_cache(self.model, batch, self.ids.shape[1] + self.longest_answer)
        vocab_size = self.model.config.vocab_size
        sampling = generation.sampling_state([generation.GREEDY] * batch, self.ids, vocab_size)
        left = jnp.full((batch,), self.longest_answer, jnp.int32)
        start = 0
        for cut in cuts:
            assert 0 < cut - start <= CHUNK
            piece = np.zeros((batch, CHUNK), np.int32)
            piece[:, : cut - start] = self.ids[:, start:cut]
            new = np.clip(self.lengths - start, 0, cut - start).astype(np.int32)
            context = np.minimum(self.lengths, start).astype(np.int32)
            progress, logits = generation.prefill(
                graphdef, state, cache, piece, new, context, left, sampling, None
            )
            yield cut, progress.cache, logits
            cache, start = progress.cache, cut


@functools.cache
def run(name: str, dtype: str = "float32") -> Run:
    """The run of a folder, shared by all tests of a session."""
    return Run(name, dtype)


def cached_latents(cache, layer: int, row: int, length: int) -> np.ndarray:
    """MLA rows [length, R + R_rope] of sequence `row`, which owns the row-th run of pages."""
    pages, batch = cache.mla.pool.shape[1], cache.kda.state.shape[1]
    mine = cache.mla.pool[layer].reshape(batch, pages // batch * cache.mla.pool.shape[2], -1)
    return np.asarray(mine[row, :length])


def bfloat16_ties(ids: np.ndarray) -> np.ndarray:
    """Where bfloat16 may choose other experts: bool [T], from the float64 oracle.

    Its scores are off by 1e-3 to 5e-3, whatever the order of rounding, and a token with another
    expert has other logits altogether.
    """
    oracle = K3(GOLDEN / "k3_bf16")
    return oracle(ids).token_gaps < 5e-3


def check_bfloat16() -> None:
    """k3_bf16 in bfloat16; the residual branches of the other sets amplify its rounding.

    Near ties of the router apart, logits are within 5 % rms, and greedy tokens the same as long as
    no near tie comes up (of experts, or of the two best logits, whose smallest gap is 0.076).
    """
    shared = run("k3_bf16", "bfloat16")
    found = shared.parts["golden"]
    logits = np.asarray(shared.forward[0])
    assert logits.dtype == np.float32
    reference, ids = found.data["logits"], found.data["input_ids"]
    sure = ~np.stack([bfloat16_ties(row) for row in ids])
    assert sure.mean() > 0.8
    square = np.square(logits - reference).mean(-1)
    assert np.sqrt(square[sure].mean() / np.square(reference[sure]).mean()) < 0.05

    ranked = np.sort(found.data["greedy_logits"], axis=-1)
    gaps = ranked[..., -1] - ranked[..., -2]
    compared = 0
    for row, expected in enumerate(found.data["greedy_ids"]):
        ties = bfloat16_ties(np.concatenate([ids[row], expected[:-1]]))[ids.shape[1] - 1 :]
        ties |= gaps[row] < 0.1
        count = int(np.argmax(ties)) if ties.any() else len(ties)
        compared += count
        np.testing.assert_array_equal(shared.greedy.token_ids[row, :count], expected[:count])
    assert compared >= 5

    cache = shared.greedy.cache
    assert cache.kda.state.dtype == np.float32
    assert cache.mla.pool.dtype == cache.kda.conv_q.dtype == shared.model.dtype == "bfloat16"
