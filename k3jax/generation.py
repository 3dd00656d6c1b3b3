"""The plain generation loop: prefill, then a jitted decode loop over a donated cache.

It runs one fixed batch and has no scheduler, so it is short enough to be trusted: it is the oracle
that the engine is compared with.
"""

import functools
import operator
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from k3jax.distributed.sharding import on_mesh, state_specs
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import (
    RowRequest,
    SamplingState,
    needs_wide_row,
    observe,
    pack_rows,
    sample,
    wide_row,
)
from k3jax.errors import EngineError, RequestError
from k3jax.models.cache import (
    Batch,
    DecodeRows,
    K3Cache,
    PrefillRows,
    allocate_cache,
    cache_specs,
)
from k3jax.models.k3 import K3Model, checked_prompts
from pallas_kernels.common.segments import Segments

PAGE_SIZE = 64
# Rounded up to this, so that a similar call meets a compiled program.
STEP_BUCKET = 16
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
    """Where each of B sequences stands.

    The last token is chosen, but not yet in the cache nor in the sampler's counts.
    """

    cache: K3Cache
    last: Int[Array, " B"]
    lens: Int[Array, " B"]  # tokens in the cache
    left: Int[Array, " B"]  # tokens still wanted; 0 when a sequence is done
    sampling: SamplingState  # row b is sequence b's
    finite: Bool[Array, " B"]  # so far every token was chosen from finite numbers


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
    `max_tokens`, and stop tokens add to `stop_token_ids`. Several outputs, logprobs, and what needs
    a tokenizer are refused. prefill_chunk: feed the prompts in pieces of that many tokens, by one
    program. A model whose numbers are not finite is an `EngineError`.
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
    prompts = [ids[:length] for ids, length in zip(input_ids, lengths, strict=True)]
    sampling = sampling_state(each, prompts, model.config.vocab_size, more_stops)

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
            graphdef, state, cache, piece, new, context, left, sampling, model.mesh
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
        jnp.int32(max_new_tokens - 1),
        capacity=-(-max_new_tokens // STEP_BUCKET) * STEP_BUCKET,
        keep_logits=return_logits,
        mesh=model.mesh,
    )
    broken = np.flatnonzero(~np.asarray(progress.finite))
    if broken.size:
        raise EngineError(
            f"sequences {broken.tolist()}: the model's numbers are not finite, or the sampling "
            "parameters leave no token to choose"
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
            later.sampling,
            jnp.where(mask, later.finite, progress.finite),
        )
        row = jnp.where(mask[:, None], later_row, row)
    return progress, row


def sampling_state(
    each: Sequence[SamplingParams],
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    stop_token_ids: Collection[int] = (),
) -> SamplingState:
    """The sampler's tables for these prompts, in NumPy; a request without a seed gets a random one.

    Refuses what needs more than one sequence of tokens for each prompt.
    """
    counts = np.zeros((len(each), vocab_size), np.uint16)
    bias = np.zeros((len(each), vocab_size), np.float32)
    requests = []
    neutral = {"n": 1, "logprobs": None, "prompt_logprobs": None, "bad_words": ()}
    for row, (params, prompt) in enumerate(zip(each, prompts, strict=True)):
        for field, value in neutral.items():
            if getattr(params, field) != value:
                raise RequestError(f"{field} is not supported without an engine", field=field)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        stops = {*stop_token_ids, *params.stop_token_ids}
        requests.append(RowRequest(params, seed, len(prompt), sorted(stops)))
        if needs_wide_row(params):
            counts[row], bias[row] = wide_row(params, prompt, (), (), vocab_size)
    return SamplingState(pack_rows(requests), counts, bias)


def _page_table(cache: K3Cache, batch: int) -> Int[Array, "B max_pages"]:
    """Sequence b owns the b-th run of pages."""
    return jnp.arange(cache.mla.pool.shape[1], dtype=jnp.int32).reshape(batch, -1)


@functools.partial(jax.jit, static_argnames=("graphdef", "mesh"), donate_argnames="cache")
def prefill(
    graphdef,
    state,
    cache: K3Cache,
    tokens: Int[Array, "B T"],
    lens: Int[Array, " B"],
    context_lens: Int[Array, " B"] | None,
    left: Int[Array, " B"],
    sampling: SamplingState,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Progress, Float[Array, "B V"]]:
    """Takes in the first `lens[b]` of each row's tokens and chooses the next token.

    Also returns the logits it was chosen from. Rows without tokens choose nothing meaningful.
    """
    count, width = tokens.shape

    def run(state, cache, tokens, lens, context_lens, left, sampling):
        model = nnx.merge(graphdef, state)
        segments = Segments.rectangle(count, width, lens)
        rows = PrefillRows(segments, context_lens, None, _page_table(cache, count))
        hidden, cache = model.step(tokens.reshape(-1), Batch(prefill=rows), cache)
        logits = model.logits(hidden[segments.starts + jnp.maximum(lens - 1, 0)])
        total = lens if context_lens is None else context_lens + lens
        choice = sample(logits, sampling, jnp.arange(count, dtype=jnp.int32), total)
        left = _left(left, choice.token, sampling)
        return Progress(cache, choice.token, total, left, sampling, choice.finite), logits

    plain, specs = PartitionSpec(), cache_specs()
    return on_mesh(
        mesh,
        run,
        (state_specs(state), specs, plain, plain, plain, plain, plain),
        (Progress(specs, plain, plain, plain, plain, plain), plain),
    )(state, cache, tokens, lens, context_lens, left, sampling)


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "capacity", "keep_logits", "mesh"),
    donate_argnames="progress",
)
def decode(
    graphdef,
    state,
    progress: Progress,
    num_steps: Int[Array, ""],
    *,
    capacity: int,
    keep_logits: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Progress, Int[Array, "B N"], Float[Array, "B M V"]]:
    """Up to `num_steps` (at most `capacity`) tokens of each sequence, -1 past the end of one."""
    count = progress.last.shape[0]
    rows = jnp.arange(count, dtype=jnp.int32)

    def run(state, progress, num_steps):
        model = nnx.merge(graphdef, state)
        page_table = _page_table(progress.cache, count)
        out = jnp.full((count, capacity), -1, jnp.int32)
        kept = jnp.zeros(
            (count, capacity if keep_logits else 0, model.config.vocab_size), jnp.float32
        )

        def body(carry):
            i, progress, out, kept = carry
            active = progress.left > 0
            batch = Batch(DecodeRows(progress.lens, active, page_table))
            hidden, cache = model.step(progress.last, batch, progress.cache)
            logits = model.logits(hidden)
            lens = progress.lens + active.astype(jnp.int32)
            sampling = observe(progress.sampling, rows, progress.last, active)
            choice = sample(logits, sampling, rows, lens)
            token, finite = choice.token, progress.finite & (choice.finite | ~active)
            out = out.at[:, i].set(jnp.where(active, token, -1))
            if keep_logits:
                kept = kept.at[:, i].set(logits)
            left = jnp.where(active, _left(progress.left, token, sampling), 0)
            return i + 1, Progress(cache, token, lens, left, sampling, finite), out, kept

        def going(carry):
            return (carry[0] < num_steps) & jnp.any(carry[1].left > 0)

        start = (jnp.int32(0), progress, out, kept)
        _, progress, out, kept = jax.lax.while_loop(going, body, start)
        return progress, out, kept

    plain, specs = PartitionSpec(), cache_specs()
    whole = Progress(specs, plain, plain, plain, plain, plain)
    return on_mesh(mesh, run, (state_specs(state), whole, plain), (whole, plain, plain))(
        state, progress, num_steps
    )


def _left(left, token, sampling: SamplingState):
    """Tokens still wanted after `token`; none after a stop token."""
    is_stop = jnp.any(token[:, None] == sampling.rows.stop_ids, axis=1)
    return jnp.where(is_stop, 0, left - 1)
