"""The step programs: pure functions of (weights, engine state, inputs), one for each static shape.

    move     zeroes and copies pages and slots, before the forward pass that needs it
    wide     loads one row of the sampler's wide tables, for requests that use them
    mixed    one new token of D rows and T known tokens of P sequences, and a token for each row
             whose known tokens are complete
    decode   up to K tokens of B rows in a loop on the device, which sees stop tokens itself

Each donates the state and returns it with everything updated in place. Padding names row 0, slot 0
and page 0, which no sequence ever has.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt16

from k3jax.distributed.sharding import on_mesh, state_specs
from k3jax.engine.sampling import (
    Choice,
    SamplingRows,
    observe,
    sample,
    set_rows,
    set_wide_row,
    token_logprobs,
)
from k3jax.engine.state import EngineState, RowState, engine_specs
from k3jax.models.cache import Batch, Checkpoints, DecodeRows, K3Cache, LatentCache, PrefillRows
from k3jax.models.k3 import K3Model
from pallas_kernels.common.segments import Segments

PROMPT_LOGPROBS_BLOCK = 64  # prompt positions whose logits exist at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moves:
    """What happens to pages and slots before a forward pass; only the first entries count.

    No item is both read and written, and none is written twice.
    """

    counts: Int[Array, " 4"]  # of each list below
    zero_pages: Int[Array, " N"]
    zero_slots: Int[Array, " N"]
    page_copies: Int[Array, "N 3"]  # source, target, rows to copy; the others become zero
    slot_copies: Int[Array, "N 2"]  # source, target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeInputs:
    """B rows that generate. A page of number -1 is not there."""

    rows: Int[Array, " B"]
    num_tokens: Int[Array, " B"]  # at most so many now; 0 for padding
    new_page_column: Int[Array, " B"]  # place of a new page in the row's table
    new_page: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillInputs:
    """T packed tokens of P sequences. Everything the device knows about their rows is set anew."""

    tokens: Int[Array, " T"]
    starts: Int[Array, " P"]
    lens: Int[Array, " P"]
    context_lens: Int[Array, " P"]
    rows: Int[Array, " P"]
    slots: Int[Array, " P"]
    max_lengths: Int[Array, " P"]
    samples: Bool[Array, " P"]  # the last known token is among these: choose the next
    page_tables: Int[Array, "P max_pages"]
    checkpoints: Checkpoints
    sampling: SamplingRows
    targets: Int[Array, " T"]  # the token after each whose logprobs are wanted; else -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What the host reads of a step of R rows and at most K tokens each.

    tokens: int32 [R, K + 2]: the tokens, -1 behind the last one; how many; whether logits were
    finite. The rest only means something for rows that ask for logprobs.
    """

    tokens: Int[Array, "R K_plus_2"]
    logprobs: Float[Array, "R K"]
    ranks: Int[Array, "R K"]
    top_ids: Int[Array, "R K L"]
    top_logprobs: Float[Array, "R K L"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of given tokens, for T positions."""

    logprobs: Float[Array, " T"]
    ranks: Int[Array, " T"]
    top_ids: Int[Array, "T L"]
    top_logprobs: Float[Array, "T L"]


@dataclass(frozen=True)
class StepOptions:
    """Static settings that all step programs of an engine share."""

    logprobs_mode: str
    max_logprobs: int
    num_decode_steps: int
    aligned: bool  # every prefill starts at a multiple of the KDA chunk


def make_programs(graphdef: nnx.GraphDef, mesh: jax.sharding.Mesh | None, options: StepOptions):
    """The four functions, jitted; (state, ...) or (weights, state, ...) -> (state, ...)."""
    plain = PartitionSpec()

    def everywhere(tree):
        return jax.tree.map(lambda _: plain, tree)

    def move(state: EngineState, moves: Moves) -> EngineState:
        specs = engine_specs(state)
        run = on_mesh(mesh, _move, (specs.cache, everywhere(moves)), specs.cache)
        return dataclasses.replace(state, cache=run(state.cache, moves))

    def wide(
        state: EngineState,
        row: Int[Array, ""],
        counts: UInt16[Array, " V"],
        bias: Float[Array, " V"],
    ) -> EngineState:
        return dataclasses.replace(state, sampling=set_wide_row(state.sampling, row, counts, bias))

    def mixed(weights, state: EngineState, decode: DecodeInputs, prefill: PrefillInputs):
        def run(weights, state, decode, prefill):
            model = nnx.merge(graphdef, weights)
            return _mixed(model, state, decode, prefill, options)

        specs = engine_specs(state)
        arguments = (state_specs(weights), specs, everywhere(decode), everywhere(prefill))
        return on_mesh(mesh, run, arguments, (specs, plain, plain))(weights, state, decode, prefill)

    def decode(weights, state: EngineState, inputs: DecodeInputs):
        def run(weights, state, inputs):
            return _decode(nnx.merge(graphdef, weights), state, inputs, options)

        specs = engine_specs(state)
        arguments = (state_specs(weights), specs, everywhere(inputs))
        return on_mesh(mesh, run, arguments, (specs, plain))(weights, state, inputs)

    return {
        function.__name__: jax.jit(function, donate_argnames="state")
        for function in (move, wide, mixed, decode)
    }


def _move(cache: K3Cache, moves: Moves) -> K3Cache:
    """One item after the other, in place: so that temporary memory is one item's."""

    def each(count, function, carry):
        return jax.lax.fori_loop(jnp.int32(0), count, function, carry)

    def put(pool, item, value):
        return jax.lax.dynamic_update_index_in_dim(pool, value, item, axis=1)

    def take(pool, item):
        return jax.lax.dynamic_index_in_dim(pool, item, axis=1, keepdims=False)

    def zero_page(i, mla):
        return put(mla, moves.zero_pages[i], jnp.zeros_like(mla[:, 0]))

    def zero_slot(i, kda):
        slot = moves.zero_slots[i]
        return jax.tree.map(lambda pool: put(pool, slot, jnp.zeros_like(pool[:, 0])), kda)

    def copy_page(i, mla):
        source, target, count = moves.page_copies[i]
        page = take(mla, source)
        kept = jnp.arange(page.shape[1], dtype=jnp.int32)[None, :, None] < count
        return put(mla, target, jnp.where(kept, page, jnp.zeros((), page.dtype)))

    def copy_slot(i, kda):
        source, target = moves.slot_copies[i]
        return jax.tree.map(lambda pool: put(pool, target, take(pool, source)), kda)

    pages, slots, page_copies, slot_copies = moves.counts
    mla = each(pages, zero_page, cache.mla.pool)
    mla = each(page_copies, copy_page, mla)
    kda = each(slots, zero_slot, cache.kda)
    kda = each(slot_copies, copy_slot, kda)
    return K3Cache(kda, LatentCache(mla, cache.mla.scale))


def _with_new_pages(rows: RowState, inputs: DecodeInputs) -> RowState:
    column = jnp.where(inputs.new_page < 0, rows.page_table.shape[1], inputs.new_page_column)
    table = rows.page_table.at[inputs.rows, column].set(inputs.new_page, mode="drop")
    return dataclasses.replace(rows, page_table=table)


def _stops(choice: Choice, state: EngineState, rows, length) -> Bool[Array, " B"]:
    """Whether a row is complete with its new token; `length` counts that token too."""
    is_stop = jnp.any(choice.token[:, None] == state.sampling.rows.stop_ids[rows], axis=1)
    return is_stop | (length >= state.rows.max_length[rows]) | ~choice.finite


def _mixed(
    model: K3Model,
    state: EngineState,
    decode: DecodeInputs,
    prefill: PrefillInputs,
    options: StepOptions,
) -> tuple[EngineState, StepOutputs, PromptLogprobs]:
    """See the top of this file. Rows of the outputs: those that decode, then the sequences."""
    rows = _with_new_pages(state.rows, decode)
    rows = RowState(
        rows.last_token,
        rows.length,
        rows.max_length.at[prefill.rows].set(prefill.max_lengths),
        rows.stopped.at[prefill.rows].set(jnp.zeros_like(prefill.samples)),
        rows.slot.at[prefill.rows].set(prefill.slots),
        rows.page_table.at[prefill.rows].set(prefill.page_tables),
    )
    sampling = set_rows(state.sampling, prefill.rows, prefill.sampling)
    state = EngineState(state.cache, rows, sampling)

    active = (decode.num_tokens > 0) & ~rows.stopped[decode.rows]
    context = rows.length[decode.rows]
    count = decode.rows.shape[0]
    table, slots = rows.page_table[decode.rows], rows.slot[decode.rows]
    batch = Batch(
        DecodeRows(context, active, table, slots) if count else None,
        PrefillRows(
            Segments(prefill.starts, prefill.lens),
            prefill.context_lens,
            prefill.slots,
            prefill.page_tables,
            prefill.checkpoints,
            aligned=options.aligned,
        ),
    )
    tokens = jnp.concatenate([rows.last_token[decode.rows], prefill.tokens])
    hidden, cache = model.step(tokens, batch, state.cache)
    assert cache is not None
    ends = count + prefill.starts + jnp.maximum(prefill.lens - 1, 0)
    last = jnp.concatenate([hidden[:count], hidden[ends]])

    all_rows = jnp.concatenate([decode.rows, prefill.rows])
    length = jnp.concatenate([context + 1, prefill.context_lens + prefill.lens])
    samples = jnp.concatenate([active, prefill.samples])
    computed = jnp.concatenate([active, prefill.lens > 0])
    choice = _choose(model, last, state, all_rows, length, options)
    sampling = observe(state.sampling, all_rows, choice.token, samples)
    stops = _stops(choice, state, all_rows, length + 1) & samples
    # Row 0 takes what does not count.
    place = jnp.where(computed, all_rows, 0)
    rows = dataclasses.replace(
        rows,
        last_token=rows.last_token.at[place].set(choice.token),
        length=rows.length.at[place].set(length),
        stopped=rows.stopped.at[jnp.where(samples, all_rows, 0)].set(stops),
    )
    outputs = StepOutputs(
        _packed(jnp.where(samples, choice.token, -1)[:, None], samples, choice.finite | ~computed),
        choice.logprob[:, None],
        choice.rank[:, None],
        choice.top_ids[:, None],
        choice.top_logprobs[:, None],
    )
    prompt = _prompt_logprobs(model, hidden[count:], prefill.targets, options)
    return EngineState(cache, rows, sampling), outputs, prompt


def _choose(model: K3Model, hidden, state: EngineState, rows, position, options: StepOptions):
    return sample(
        model.logits(hidden),
        state.sampling,
        rows,
        position,
        logprobs_mode=options.logprobs_mode,
        max_logprobs=options.max_logprobs,
    )


def _packed(tokens, count, finite) -> Int[Array, "R K_plus_2"]:
    columns = [count.astype(jnp.int32)[:, None], finite.astype(jnp.int32)[:, None]]
    return jnp.concatenate([tokens, *columns], axis=1)


def _prompt_logprobs(model: K3Model, hidden, targets, options: StepOptions) -> PromptLogprobs:
    """Of a block of positions at a time, and only if any are wanted."""
    num_tokens, width = hidden.shape
    block = min(PROMPT_LOGPROBS_BLOCK, num_tokens)
    spare = -num_tokens % block

    def one(rows):
        x, wanted = rows
        found = token_logprobs(
            model.logits(x), jnp.maximum(wanted, 0), options.max_logprobs, options.logprobs_mode
        )
        return PromptLogprobs(*found)

    def compute():
        x = jnp.pad(hidden, ((0, spare), (0, 0))).reshape(-1, block, width)
        found = jax.lax.map(one, (x, jnp.pad(targets, (0, spare)).reshape(-1, block)))
        return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:num_tokens], found)

    def nothing():
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(compute))

    return jax.lax.cond(jnp.any(targets >= 0), compute, nothing)


def _decode(
    model: K3Model, state: EngineState, inputs: DecodeInputs, options: StepOptions
) -> tuple[EngineState, StepOutputs]:
    """See the top of this file. A row that stops, or has its tokens, rests while others go on."""
    at, limit = inputs.rows, inputs.num_tokens
    rows = _with_new_pages(state.rows, inputs)
    state = dataclasses.replace(state, rows=rows)
    slots, table = rows.slot[at], rows.page_table[at]
    count, steps, tops = at.shape[0], options.num_decode_steps, options.max_logprobs
    outputs = StepOutputs(
        jnp.full((count, steps), -1, jnp.int32),
        jnp.zeros((count, steps), jnp.float32),
        jnp.zeros((count, steps), jnp.int32),
        jnp.zeros((count, steps, tops), jnp.int32),
        jnp.zeros((count, steps, tops), jnp.float32),
    )

    def body(carry):
        i, cache, sampling, last, length, stopped, finite, made, outputs = carry
        active = (made < limit) & ~stopped
        batch = Batch(DecodeRows(length, active, table, slots))
        hidden, cache = model.step(last, batch, cache)
        assert cache is not None
        now = EngineState(cache, rows, sampling)
        length = length + active.astype(jnp.int32)
        choice = _choose(model, hidden, now, at, length, options)
        sampling = observe(sampling, at, choice.token, active)
        outputs = StepOutputs(
            outputs.tokens.at[:, i].set(jnp.where(active, choice.token, -1)),
            outputs.logprobs.at[:, i].set(choice.logprob),
            outputs.ranks.at[:, i].set(choice.rank),
            outputs.top_ids.at[:, i].set(choice.top_ids),
            outputs.top_logprobs.at[:, i].set(choice.top_logprobs),
        )
        finite = finite & (choice.finite | ~active)
        stopped = stopped | (active & _stops(choice, now, at, length + 1))
        last = jnp.where(active, choice.token, last)
        made = made + active.astype(jnp.int32)
        return i + 1, cache, sampling, last, length, stopped, finite, made, outputs

    def going(carry):
        i, stopped, made = carry[0], carry[5], carry[7]
        return (i < steps) & jnp.any((made < limit) & ~stopped)

    start = (
        jnp.int32(0),
        state.cache,
        state.sampling,
        rows.last_token[at],
        rows.length[at],
        rows.stopped[at],
        jnp.ones((count,), bool),
        jnp.zeros((count,), jnp.int32),
        outputs,
    )
    _, cache, sampling, last, length, stopped, finite, made, outputs = jax.lax.while_loop(
        going, body, start
    )
    rows = dataclasses.replace(
        rows,
        last_token=rows.last_token.at[at].set(last),
        length=rows.length.at[at].set(length),
        stopped=rows.stopped.at[at].set(stopped),
    )
    outputs = dataclasses.replace(outputs, tokens=_packed(outputs.tokens, made, finite))
    return EngineState(cache, rows, sampling), outputs
