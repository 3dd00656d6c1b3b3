"""The plain generation loop: prefill, then a jitted decode loop over a donated cache.

It runs one fixed batch and has no scheduler, so it is short enough to be trusted: it is the oracle
that faster engines are compared with, and it serves one request at a time.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from k3jax.distributed.sharding import on_mesh, state_specs
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingArrays, sample
from k3jax.errors import RequestError
from k3jax.models.cache import Batch, K3Cache, allocate_cache, cache_specs
from k3jax.models.k3 import K3Model, checked_prompts
from pallas_kernels.common.segments import Segments

PAGE_SIZE = 64
# Shapes are rounded up to these, so that a similar call meets a compiled program.
STEP_BUCKET = 16
STOP_BUCKET = 8
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns for B sequences and at most N new tokens."""

    token_ids: np.ndarray  # int32 [B, N]; -1 after a sequence's end, the stop token included
    num_tokens: np.ndarray  # int32 [B]
    logits: np.ndarray | None  # float32 [B, N, vocab], the row each token was chosen from
    cache: K3Cache  # memory of all tokens but the last; of finished sequences it means nothing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """Where each of B sequences stands. The last token is chosen but not yet in the cache."""

    cache: K3Cache
    last: Int[Array, " B"]
    lens: Int[Array, " B"]  # tokens in the cache
    left: Int[Array, " B"]  # tokens still wanted; 0 when a sequence is done


def generate(
    model: K3Model,
    input_ids,
    *,
    max_new_tokens: int,
    lengths=None,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    stop_token_ids: Sequence[int] = (),
    prefill_chunk: int | None = None,
    return_logits: bool = False,
) -> GenerateOutput:
    """Continues a batch of prompts, int [B, T], right-padded where `lengths` [B] says so.

    params: one for all sequences or one for each; `max_new_tokens` takes the place of their
    `max_tokens`, stop tokens add to `stop_token_ids`, and stop strings, which need a tokenizer, are
    refused. prefill_chunk: feed the prompts in pieces of that many tokens, by one program.
    """
    input_ids, lengths = checked_prompts(input_ids, lengths, model.config.vocab_size)
    batch, width = input_ids.shape
    max_new_tokens = _count(max_new_tokens, "max_new_tokens")
    limit = model.config.max_position_embeddings
    if width + max_new_tokens > limit:
        raise RequestError(
            f"{width} prompt tokens and max_new_tokens={max_new_tokens} exceed the model's {limit}",
            field="max_new_tokens",
        )
    chunk = width if prefill_chunk is None else _count(prefill_chunk, "prefill_chunk")
    chunk = min(width, chunk)
    each = [params] * batch if isinstance(params, SamplingParams) else list(params or ())
    if len(each) != batch or not all(isinstance(p, SamplingParams) for p in each):
        raise RequestError(
            f"params must be SamplingParams, one for all or one for each of {batch} sequences",
            field="params",
        )
    more_stops = SamplingParams(stop_token_ids=stop_token_ids).stop_token_ids  # type: ignore[arg-type]
    if any(p.stop for p in each):
        raise RequestError("stop strings need a tokenizer; use stop_token_ids", field="stop")
    sampling = SamplingArrays.pack(each)
    stops = _pack_stops([{*more_stops, *p.stop_token_ids} for p in each])

    graphdef, state = model.split()
    cache = new_cache(model, batch, width + max_new_tokens)
    left = jnp.full((batch,), max_new_tokens, jnp.int32)
    padded = np.pad(input_ids, ((0, 0), (0, -width % chunk)))
    firsts, rows = [], []
    for start in range(0, width, chunk):
        piece = padded[:, start : start + chunk]
        context = None if chunk == width else np.minimum(lengths, start).astype(np.int32)
        new = np.clip(lengths - start, 0, chunk).astype(np.int32)
        progress, row = prefill(
            graphdef, state, cache, piece, new, context, left, sampling, stops, model.mesh
        )
        cache = progress.cache
        firsts.append((new > 0, progress))
        rows.append(row)
    # Prompts of unequal length end in different pieces; each keeps the token of its own last one.
    progress, row = _latest(firsts, rows)
    first = np.asarray(progress.last)[:, None]
    progress, rest, logits = decode(
        graphdef,
        state,
        progress,
        sampling,
        stops,
        jnp.int32(max_new_tokens - 1),
        capacity=-(-max_new_tokens // STEP_BUCKET) * STEP_BUCKET,
        keep_logits=return_logits,
        mesh=model.mesh,
    )
    token_ids = np.concatenate([first, np.asarray(rest)], axis=1)[:, :max_new_tokens]
    kept = None
    if return_logits:
        kept = np.concatenate([np.asarray(row)[:, None], np.asarray(logits)], axis=1)
        kept = kept[:, :max_new_tokens]
    return GenerateOutput(token_ids, (token_ids >= 0).sum(axis=1), kept, progress.cache)


def _count(value, field: str) -> int:
    """A positive number of tokens, also from NumPy."""
    if isinstance(value, bool):
        raise RequestError(f"{field} must be an integer", field=field)
    try:
        count = operator.index(value)
    except TypeError:
        raise RequestError(f"{field} must be an integer", field=field) from None
    if count < 1:
        raise RequestError(f"{field} must be at least 1", field=field)
    return count


def new_cache(model: K3Model, batch: int, max_len: int) -> K3Cache:
    """A cache for `batch` sequences of at most `max_len` tokens, sequence b in slot b."""
    cache = allocate_cache(
        model.config,
        num_slots=batch,
        num_pages=batch * -(-max_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
        dtype=model.dtype,
    )
    if model.mesh is None:
        return cache
    return jax.tree.map(
        lambda pool, spec: jax.device_put(pool, NamedSharding(model.mesh, spec)),
        cache,
        cache_specs(),
    )


def _latest(firsts, rows):
    """Progress and logits of each sequence from the last piece that held tokens of it."""
    progress, row = firsts[0][1], rows[0]
    for (took_part, later), later_row in zip(firsts[1:], rows[1:], strict=True):
        mask = jnp.asarray(took_part)
        progress = Progress(
            later.cache,
            jnp.where(mask, later.last, progress.last),
            later.lens,
            jnp.where(mask, later.left, progress.left),
        )
        row = jnp.where(mask[:, None], later_row, row)
    return progress, row


def _pack_stops(each: Sequence[set[int]], width: int = STOP_BUCKET) -> np.ndarray:
    """Stop tokens of each sequence, int32 [B, a multiple of `width`], filled up with -1."""
    most = max(1, *map(len, each))
    stops = np.full((len(each), -(-most // width) * width), -1, np.int32)
    for row, ids in zip(stops, each, strict=True):
        row[: len(ids)] = sorted(ids)
    return stops


def _page_table(cache: K3Cache, batch: int) -> Int[Array, "B max_pages"]:
    """Sequence b owns the b-th run of pages."""
    return jnp.arange(cache.mla.shape[1], dtype=jnp.int32).reshape(batch, -1)


@functools.partial(jax.jit, static_argnames=("graphdef", "mesh"), donate_argnames="cache")
def prefill(
    graphdef,
    state,
    cache: K3Cache,
    tokens: Int[Array, "B T"],
    lens: Int[Array, " B"],
    context_lens: Int[Array, " B"] | None,
    left: Int[Array, " B"],
    sampling: SamplingArrays,
    stops: Int[Array, "B S"],
    mesh: jax.sharding.Mesh | None,
) -> tuple[Progress, Float[Array, "B V"]]:
    """Takes in the first `lens[b]` of each row's tokens and chooses the next token.

    Also returns the logits it was chosen from. Rows without tokens choose nothing meaningful.
    """
    count, width = tokens.shape

    def run(state, cache, tokens, lens, context_lens, left, sampling, stops):
        model = nnx.merge(graphdef, state)
        segments = Segments.rectangle(count, width, lens)
        batch = Batch(segments, context_lens, None, _page_table(cache, count))
        hidden, cache = model.step(tokens.reshape(-1), batch, cache)
        logits = model.logits(hidden[segments.starts + jnp.maximum(lens - 1, 0)])
        total = lens if context_lens is None else context_lens + lens
        token = sample(logits, sampling, total)
        return Progress(cache, token, total, _left(left, token, stops)), logits

    plain, specs = PartitionSpec(), cache_specs()
    return on_mesh(
        mesh,
        run,
        (state_specs(state), specs, plain, plain, plain, plain, plain, plain),
        (Progress(specs, plain, plain, plain), plain),
    )(state, cache, tokens, lens, context_lens, left, sampling, stops)


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "capacity", "keep_logits", "mesh"),
    donate_argnames="progress",
)
def decode(
    graphdef,
    state,
    progress: Progress,
    sampling: SamplingArrays,
    stops: Int[Array, "B S"],
    num_steps: Int[Array, ""],
    *,
    capacity: int,
    keep_logits: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Progress, Int[Array, "B N"], Float[Array, "B M V"]]:
    """Up to `num_steps` (at most `capacity`) tokens of each sequence, -1 past the end of one."""
    count = progress.last.shape[0]
    rows = jnp.arange(count, dtype=jnp.int32)

    def run(state, progress, sampling, stops, num_steps):
        model = nnx.merge(graphdef, state)
        page_table = _page_table(progress.cache, count)
        out = jnp.full((count, capacity), -1, jnp.int32)
        kept = jnp.zeros(
            (count, capacity if keep_logits else 0, model.config.vocab_size), jnp.float32
        )

        def body(carry):
            i, progress, out, kept = carry
            active = progress.left > 0
            segments = Segments(rows, active.astype(jnp.int32))
            batch = Batch(segments, progress.lens, None, page_table, is_decode=True)
            hidden, cache = model.step(progress.last, batch, progress.cache)
            logits = model.logits(hidden)
            lens = progress.lens + active.astype(jnp.int32)
            token = sample(logits, sampling, lens)
            out = out.at[:, i].set(jnp.where(active, token, -1))
            if keep_logits:
                kept = kept.at[:, i].set(logits)
            left = jnp.where(active, _left(progress.left, token, stops), 0)
            return i + 1, Progress(cache, token, lens, left), out, kept

        def going(carry):
            return (carry[0] < num_steps) & jnp.any(carry[1].left > 0)

        start = (jnp.int32(0), progress, out, kept)
        _, progress, out, kept = jax.lax.while_loop(going, body, start)
        return progress, out, kept

    plain, specs = PartitionSpec(), cache_specs()
    whole = Progress(specs, plain, plain, plain)
    return on_mesh(
        mesh, run, (state_specs(state), whole, plain, plain, plain), (whole, plain, plain)
    )(state, progress, sampling, stops, num_steps)


def _left(left, token, stops):
    """Tokens still wanted after `token`; none after a stop token."""
    is_stop = jnp.any(token[:, None] == stops, axis=1)
    return jnp.where(is_stop, 0, left - 1)


class Generator:
    """One request at a time on a model whose programs are compiled ahead.

    Prompts go in by chunks of a fixed size, tokens come out a few per dispatch, so two compiled
    programs serve every prompt and every length.
    """

    CHUNK = 256
    STEPS = 8
    MAX_STOPS = 128

    def __init__(self, model: K3Model, *, max_model_len: int | None = None):
        limit = model.config.max_position_embeddings
        self.max_model_len = min(limit, 8192) if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= limit:
            raise RequestError(
                f"max_model_len={max_model_len} must be in 2..{limit} (max_position_embeddings)",
                field="max_model_len",
            )
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._graphdef, self._state = model.split()
        self._cache: K3Cache | None = None
        self._compile()

    @classmethod
    def from_pretrained(
        cls, path, *, dtype=None, max_model_len: int | None = None, mesh=None
    ) -> "Generator":
        """Loads a checkpoint and compiles both programs."""
        model = K3Model.from_pretrained(path, dtype=dtype, mesh=mesh)
        return cls(model, max_model_len=max_model_len)

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, stop_token_ids=frozenset()
    ) -> Iterator[list[int]]:
        """New token ids in non-empty lists, a stop token included; close the iterator to cancel.

        Stop tokens of `params` count too; stop strings are the caller's business.
        """
        prompt = np.asarray(prompt_ids)
        if prompt.ndim != 1 or prompt.size == 0:
            raise RequestError("the prompt is empty", field="prompt")
        if prompt.dtype.kind not in "iu":
            raise RequestError("the prompt must be token ids", field="prompt")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise RequestError(f"token ids must be in 0..{self.vocab_size - 1}", field="prompt")
        if prompt.size + params.max_tokens > self.max_model_len:
            raise RequestError(
                f"{prompt.size} prompt tokens and max_tokens={params.max_tokens} exceed the "
                f"{self.max_model_len} tokens of max_model_len",
                field="max_tokens",
            )
        stops = {*stop_token_ids, *params.stop_token_ids}
        if len(stops) > self.MAX_STOPS:
            raise RequestError(f"at most {self.MAX_STOPS} stop tokens", field="stop_token_ids")
        return self._stream(prompt, params, _pack_stops([stops], self.MAX_STOPS))

    def _stream(self, prompt, params: SamplingParams, stops) -> Iterator[list[int]]:
        sampling = SamplingArrays.pack([params])
        left = np.asarray([params.max_tokens], np.int32)
        cache, self._cache = self._cache, None  # donated: gone if a step fails
        if cache is None:
            cache = self._new_cache()
        for start in range(0, prompt.size, self.CHUNK):
            piece = prompt[start : start + self.CHUNK]
            tokens = np.zeros((1, self.CHUNK), np.int32)
            tokens[0, : piece.size] = piece
            lens, context = (np.asarray([n], np.int32) for n in (piece.size, start))
            progress, _ = self._prefill(
                self._state, cache, tokens, lens, context, left, sampling, stops
            )
            cache = progress.cache
        try:
            yield [int(progress.last[0])]
            while int(progress.left[0]) > 0:
                progress, out, _ = self._decode(
                    self._state, progress, sampling, stops, np.int32(self.STEPS)
                )
                yield [int(token) for token in np.asarray(out)[0] if token >= 0]
        except GeneratorExit:  # closed by the caller; the cache is whole
            self._cache = progress.cache
            raise
        self._cache = progress.cache

    def _new_cache(self) -> K3Cache:
        return new_cache(self._model, 1, self.max_model_len)

    def _compile(self) -> None:
        """Both programs at once: compilation releases the interpreter lock."""
        cache = self._new_cache()
        one = np.zeros(1, np.int32)
        sampling = SamplingArrays.pack([GREEDY])
        stops = _pack_stops([set()], self.MAX_STOPS)
        mesh = self._model.mesh
        tokens = np.zeros((1, self.CHUNK), np.int32)
        progress = Progress(cache, *(jnp.asarray(one) for _ in range(3)))
        lowered = (
            prefill.lower(
                self._graphdef, self._state, cache, tokens, one, one, one, sampling, stops, mesh
            ),
            decode.lower(
                self._graphdef,
                self._state,
                progress,
                sampling,
                stops,
                np.int32(0),
                capacity=self.STEPS,
                mesh=mesh,
            ),
        )
        # On the CPU, LLVM's first level compiles a sixth quicker, and the code is no slower.
        options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
        with ThreadPoolExecutor(len(lowered)) as pool:
            programs = pool.map(lambda program: program.compile(options), lowered)
            self._prefill, self._decode = programs
        self._cache = cache
