"""What `sample` must equal: the processed distribution of a row, in float64 NumPy by full sorts."""

from dataclasses import dataclass, field

import numpy as np

from k3jax.engine.request import SamplingParams


@dataclass(frozen=True)
class Case:
    """A sequence in the middle of its generation."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)  # as tokens

    @property
    def position(self) -> int:
        """The index of its next token."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True)
class Processed:
    """adjusted: logits after masks, bias and penalties. probabilities: after all filters.

    margin: how close the nearest decision between keeping and dropping was, relative to the
    numbers compared. Decisions between equal numbers are not counted: they must agree.
    """

    adjusted: np.ndarray
    probabilities: np.ndarray
    margin: float


def adjusted_logits(logits: np.ndarray, case: Case) -> np.ndarray:
    """float64 [V] after steps 3 to 5 of the order of operations."""
    params = case.params
    z = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        z[~np.isin(np.arange(len(z)), params.allowed_token_ids)] = -np.inf
    for word in case.bad_words:
        start = word[:-1]
        if not start or case.output[-len(start) :] == start:
            z[word[-1]] = -np.inf
    if len(case.output) < params.min_tokens:
        for token in case.stops:
            z[token] = -np.inf
    for token, bias in params.logit_bias:
        z[token] += bias
    for token in {*case.prompt, *case.output}:
        r = params.repetition_penalty
        z[token] = z[token] / r if z[token] > 0 else z[token] * r
    for token in case.output:
        z[token] -= params.frequency_penalty
    for token in set(case.output):
        z[token] -= params.presence_penalty
    return z


def processed(logits: np.ndarray, case: Case) -> Processed:
    """One row of float32 logits [V]."""
    params = case.params
    z = adjusted_logits(logits, case)
    if params.greedy:
        p = np.exp(z - z.max())
        return Processed(z, p / p.sum(), np.inf)
    tempered = z / params.temperature
    p = np.exp(tempered - tempered.max())
    keep = p >= params.min_p
    margins = [np.abs(p - params.min_p).min()] if 0 < params.min_p < 1 else []
    if 0 < params.top_k < len(z):
        kth, after = np.sort(z)[::-1][params.top_k - 1 : params.top_k + 1]
        keep &= z >= kth
        margins += [kth - after] if kth > after else []
    if params.top_p < 1.0:
        left = np.where(keep, p, 0) / p[keep].sum()
        order = np.argsort(np.where(keep, z, -np.inf), kind="stable")
        total = np.cumsum(left[order])
        may_go = 1 - np.float64(np.float32(params.top_p))
        total, order = total[:-1], order[:-1]  # the last one stays in any case
        keep[order[total <= may_go]] = False
        margins.append(np.abs(total - may_go).min())
    p = np.where(keep, p, 0)
    return Processed(z, p / p.sum(), min(margins, default=np.inf))


def described(values: np.ndarray, token: int, count: int):
    """(value, rank, ids, values) of a token and of the `count` largest; equals by ascending id."""
    order = np.argsort(-values, kind="stable")[:count]
    return values[token], int((values >= values[token]).sum()), order, values[order]


def random_case(rng: np.random.Generator, vocab: int) -> Case:
    """Each parameter is away from its default now and then. Few numbers, so that ties happen."""

    def maybe(share: float, make, default):
        return make() if rng.random() < share else default

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(low, high)).tolist()

    output = maybe(0.7, lambda: ids(1, 12), [])
    bad_words = maybe(0.3, lambda: [ids(1, 4) for _ in range(3)], [])
    if output and rng.random() < 0.3:  # one that is about to be completed
        bad_words.append([*output[-int(rng.integers(1, 8)) :], *ids(1, 2)])
    params = SamplingParams(
        max_tokens=100,
        min_tokens=maybe(0.3, lambda: int(rng.integers(1, 20)), 0),
        temperature=rng.choice([0.0, 0.25, 0.5, 1.0, 1.0, 2.5]),
        top_p=maybe(0.5, lambda: rng.choice([1e-6, 0.3, 0.6, 0.9, 0.95, 0.9999]), 1.0),
        top_k=maybe(0.4, lambda: rng.choice([1, 2, 5, vocab // 2, vocab - 1, vocab, 10**6]), 0),
        min_p=maybe(0.3, lambda: rng.choice([0.01, 0.2, 0.7, 1.0]), 0.0),
        repetition_penalty=maybe(0.3, lambda: rng.choice([0.5, 1.25, 2.0]), 1.0),
        presence_penalty=maybe(0.3, lambda: rng.choice([-2.0, 0.5, 1.5]), 0.0),
        frequency_penalty=maybe(0.3, lambda: rng.choice([-0.25, 0.25, 2.0]), 0.0),
        logit_bias=maybe(0.3, lambda: {i: float(rng.integers(-4, 5)) for i in ids(1, 6)}, None),
        allowed_token_ids=maybe(0.2, lambda: ids(3, 12), None),
        seed=int(rng.integers(2**62)),
        logprobs=0,
    )
    return Case(params, ids(1, 10), output, maybe(0.6, lambda: ids(1, 4), []), bad_words)
