"""Engines over the micro model, compiled once for a session, and the tokens they must give."""

import dataclasses
import functools
import random

import numpy as np

from k3jax.checkpoint.tiny import random_model
from k3jax.engine import engine as engine_module
from k3jax.engine.config import EngineConfig
from k3jax.engine.engine import Engine
from k3jax.engine.output import Output, TextReader
from k3jax.engine.request import RequestOptions, SamplingParams
from k3jax.engine.runner import Runner
from k3jax.generation import generate
from tests.micro import MICRO

CONFIG = MICRO.replace(vocab_size=1024, max_position_embeddings=1024)
SIZES = {
    "max_model_len": 384,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 132,
    "kv_pages": 40,
    "kda_slots": 14,
}
PAGES, SLOTS = 41, 25  # of the device
MARGIN = 1e-3  # between the two best candidates; two orders of float32 sums differ by 6e-5


@functools.cache
def model():
    """The micro model with weights of a useful size."""
    return random_model(CONFIG)


_runners: dict = {}


class SharedRunner(Runner):
    """A runner whose compiled programs outlive it: they depend on shapes only.

    Its pools are as large as those of the largest cache manager here, whose settings say how much
    of them is used: so that all share their programs.
    """

    def __init__(self, model, sizes, *arguments, **options):
        pages = PAGES * 64 // sizes.page_size
        sizes = dataclasses.replace(sizes, num_pages=pages, num_slots=SLOTS)
        super().__init__(model, sizes, *arguments, **options)

    def _compile_all(self) -> None:
        key = (self.sizes, self.profile, self.options, self._exports)
        if key not in _runners:
            super()._compile_all()
            _runners[key] = self._compiled
        self._compiled = dict(_runners[key])


def make_engine(monkeypatch, **settings) -> Engine:
    """An engine with small pools."""
    monkeypatch.setattr(engine_module, "Runner", SharedRunner)
    return Engine(model(), EngineConfig(**(SIZES | settings)))


@dataclasses.dataclass
class Case:
    """A request and its oracle: tokens of the plain loop, and its logits [tokens, vocab]."""

    prompt: list[int]
    params: SamplingParams
    stops: frozenset[int]
    tokens: list[int]
    logits: np.ndarray

    def start(self, engine: Engine, **options) -> "Running":
        return Running(self).start(engine, **options)


@dataclasses.dataclass
class Running:
    """A case in an engine."""

    case: Case
    request: object = None
    steps: list = dataclasses.field(default_factory=list)

    def start(self, engine: Engine, **options) -> "Running":
        case = self.case
        output = Output(case.prompt, case.params, case.stops, TextReader(None, case.params))
        self.request = engine.prepare(output, RequestOptions(**options))
        engine.add(self.request, self.steps.append)
        return self

    @property
    def output(self) -> Output:
        return self.request.output

    def check(self) -> None:
        assert self.output.finish_reason in ("stop", "length"), self.output.error
        assert self.output.token_ids == self.case.tokens


def run(engine: Engine) -> None:
    """To the end of all requests."""
    for _ in range(10_000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("S-5")


@functools.cache
def cases() -> list[Case]:
    """Requests that share prompts' beginnings, greedy and sampled, of many lengths."""
    rng = random.Random(0)
    documents = [[rng.randrange(64) for _ in range(260)] for _ in range(4)]
    made = []
    for number in range(48):
        start = documents[number % 4][: rng.choice([0, 5, 63, 64, 65, 100, 128, 150, 200, 256])]
        prompt = start + [rng.randrange(64) for _ in range(rng.randrange(1, 20))]
        count = rng.choice([1, 2, 7, 16, 40, 40])
        fields = {"max_tokens": count, "temperature": 0.0}
        if number % 3 == 1:
            fields |= {"temperature": 0.8, "seed": number, "top_p": 0.9}
        if number % 6 == 2:
            fields |= {"temperature": 1.0, "seed": number, "top_k": 8, "min_p": 0.02}
        if number % 5 == 0:
            fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if number % 7 == 0:
            fields |= {"logit_bias": {3: 2.0, 7: -100.0}, "min_tokens": min(3, count)}
        stops = frozenset({number % 64}) if number % 2 else frozenset()
        made.append((prompt, SamplingParams(**fields), stops))
    width = max(len(prompt) for prompt, *_ in made)
    ids = np.zeros((len(made), width), np.int32)
    for row, (prompt, *_) in zip(ids, made, strict=True):
        row[: len(prompt)] = prompt
    params = [dataclasses.replace(p, stop_token_ids=tuple(stops)) for _, p, stops in made]
    found = generate(
        model(),
        ids,
        lengths=[len(prompt) for prompt, *_ in made],
        max_new_tokens=40,
        params=params,
        return_logits=True,
    )
    kept = []
    for (prompt, p, stops), tokens, logits in zip(made, found.token_ids, found.logits, strict=True):
        tokens = [int(token) for token in tokens if token >= 0][: p.max_tokens]
        best = np.sort(logits[: len(tokens)], axis=1)
        if p.greedy and np.min(best[:, -1] - best[:, -2]) < MARGIN:
            continue
        kept.append(Case(prompt, p, stops, tokens, logits[: len(tokens)]))
    assert len(kept) > 30
    return kept
