"""Choice of the next token on the device, for a batch of rows with parameters of their own.

The order of operations is vLLM's where it shows: stop tokens that come too early, bad words and
tokens that are not allowed are masked; logit bias; repetition, presence and frequency penalties;
a greedy row takes the first of the largest; temperature; min-p, top-k and top-p; a draw.

What only some requests need runs under `lax.cond`, when a row of the batch needs it: one program
serves them all. Nothing sorts the vocabulary: thresholds are found by bisection.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from k3jax.engine.request import (
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_TOKENS,
    SamplingParams,
    check_bad_word_ids,
)
from k3jax.errors import RequestError

MAX_STOP_IDS = 128  # of a request and of the model together
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Bits of `SamplingState.counts`.
IN_PROMPT = 0x8000
IN_OUTPUT = 0x7FFF
LARGEST = float(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """What is known of each of R sequences, but for what is as wide as the vocabulary."""

    temperature: Float[Array, " R"]  # 0 is greedy
    top_k: Int[Array, " R"]  # 0 keeps all
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    repetition_penalty: Float[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    seed: UInt32[Array, "R 2"]
    stop_ids: Int[Array, "R S"]  # filled up with -1
    min_length: Int[Array, " R"]  # the first position at which a stop token may be chosen
    num_logprobs: Int[Array, " R"]  # -1: none; 0: the chosen token's
    has_bias: Bool[Array, " R"]
    bad_words: Int[Array, "R W N"]  # ends with the last token; filled up with -1 in front
    recent: Int[Array, "R N_minus_1"]  # latest tokens of the output, likewise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Tables of R sequences over a vocabulary of V.

    A row of the wide tables means something only to a sequence for which `needs_wide_row`.
    """

    rows: SamplingRows
    counts: UInt16[Array, "R V"]  # top bit: in the prompt; the others: times in the output
    bias: Float[Array, "R V"]  # of logits; -inf for what may not be chosen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """The next token of each of B rows.

    finite: all logits were finite numbers and a token was left to choose; else the token is in
    range and means nothing. The rest means something for rows that ask for logprobs: value and
    rank of the token as `token_logprobs` has them, and the L likeliest tokens.
    """

    token: Int[Array, " B"]
    finite: Bool[Array, " B"]
    logprob: Float[Array, " B"]
    rank: Int[Array, " B"]
    top_ids: Int[Array, "B L"]
    top_logprobs: Float[Array, "B L"]


class RowRequest(NamedTuple):
    """A sequence as `pack_rows` takes it; a plain tuple does as well."""

    params: SamplingParams
    seed: int  # 64 bits, signed or not
    prompt_len: int
    stop_ids: Sequence[int] = ()  # also those that end every message, unless they are ignored
    bad_word_ids: Sequence[Sequence[int]] = ()
    output_ids: Sequence[int] = ()  # tokens generated so far, at least the latest


def pack_rows(requests: Sequence[tuple], count: int | None = None) -> SamplingRows:
    """NumPy rows of `RowRequest`s, followed by neutral greedy rows up to `count`."""
    count = len(requests) if count is None else count

    def full(value, dtype, *shape):
        return np.full((count, *shape), value, dtype)

    rows = SamplingRows(
        temperature=full(0, np.float32),
        top_k=full(0, np.int32),
        top_p=full(1, np.float32),
        min_p=full(0, np.float32),
        repetition_penalty=full(1, np.float32),
        presence_penalty=full(0, np.float32),
        frequency_penalty=full(0, np.float32),
        seed=full(0, np.uint32, 2),
        stop_ids=full(-1, np.int32, MAX_STOP_IDS),
        min_length=full(0, np.int32),
        num_logprobs=full(-1, np.int32),
        has_bias=full(False, np.bool_),
        bad_words=full(-1, np.int32, MAX_BAD_WORD_IDS, MAX_BAD_WORD_TOKENS),
        recent=full(-1, np.int32, MAX_BAD_WORD_TOKENS - 1),
    )
    for i, request in enumerate(requests):
        params, seed, prompt_len, stop_ids, bad_word_ids, output_ids = RowRequest(*request)
        rows.temperature[i] = params.temperature
        if not params.greedy:  # filters never drop the likeliest token
            rows.top_k[i], rows.top_p[i], rows.min_p[i] = params.top_k, params.top_p, params.min_p
        # Of numbers below the smallest normal one the device makes zero.
        rows.repetition_penalty[i] = max(params.repetition_penalty, np.finfo(np.float32).tiny)
        rows.presence_penalty[i] = params.presence_penalty
        rows.frequency_penalty[i] = params.frequency_penalty
        rows.seed[i] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"at most {MAX_STOP_IDS} stop tokens", field="stop_token_ids")
        rows.stop_ids[i, : len(stop_ids)] = sorted(stop_ids)
        rows.min_length[i] = min(prompt_len + params.min_tokens, 2**31 - 1)
        rows.num_logprobs[i] = -1 if params.logprobs is None else params.logprobs
        rows.has_bias[i] = _has_bias(params, bad_word_ids)
        check_bad_word_ids(bad_word_ids)
        for word, ids in zip(rows.bad_words[i], bad_word_ids, strict=False):
            if len(ids) > 1:  # `wide_row` has the others
                word[-len(ids) :] = ids
        latest = output_ids[-(MAX_BAD_WORD_TOKENS - 1) :]
        if len(latest):
            rows.recent[i, -len(latest) :] = latest
    return rows


def _has_bias(params: SamplingParams, bad_word_ids: Sequence[Sequence[int]]) -> bool:
    banned = any(len(ids) == 1 for ids in bad_word_ids)
    return bool(params.logit_bias) or params.allowed_token_ids is not None or banned


def needs_wide_row(params: SamplingParams, bad_word_ids: Sequence[Sequence[int]] = ()) -> bool:
    """Whether a sequence reads its row of `counts` and `bias`."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return penalties != (0.0, 0.0, 1.0) or _has_bias(params, bad_word_ids)


def wide_row(
    params: SamplingParams,
    prompt_ids: Sequence[int] | np.ndarray,
    output_ids: Sequence[int] | np.ndarray,
    bad_word_ids: Sequence[Sequence[int]],
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A sequence's rows of both wide tables: counts uint16 [V] and bias float32 [V]."""
    params.check_vocabulary(vocab_size)
    times = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size)
    counts = np.minimum(times, IN_OUTPUT).astype(np.uint16)
    counts[np.asarray(prompt_ids, np.int64)] |= np.uint16(IN_PROMPT)
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0.0
    for token_id, value in params.logit_bias:
        bias[token_id] += value
    bias[[ids[0] for ids in bad_word_ids if len(ids) == 1]] = -np.inf
    return counts, bias


def allocate_sampling(num_rows: int, vocab_size: int) -> SamplingState:
    """A state of neutral greedy rows."""
    return SamplingState(
        jax.tree.map(jnp.asarray, pack_rows([], num_rows)),
        jnp.zeros((num_rows, vocab_size), jnp.uint16),
        jnp.zeros((num_rows, vocab_size), jnp.float32),
    )


def set_rows(state: SamplingState, rows: Int[Array, " P"], packed: SamplingRows) -> SamplingState:
    """Puts P packed rows into their places; of equal places, which nothing may read, any counts."""
    placed = jax.tree.map(lambda table, new: table.at[rows].set(new), state.rows, packed)
    return SamplingState(placed, state.counts, state.bias)


def set_wide_row(
    state: SamplingState,
    row: Int[Array, ""],
    counts: UInt16[Array, " V"],
    bias: Float[Array, " V"],
) -> SamplingState:
    """Puts one row into the wide tables."""
    return SamplingState(state.rows, state.counts.at[row].set(counts), state.bias.at[row].set(bias))


def observe(
    state: SamplingState,
    rows: Int[Array, " B"],
    token: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> SamplingState:
    """Takes in a chosen token of each active row. No two active rows may be the same."""
    place = jnp.where(active, rows, state.counts.shape[0])  # the others fall off the table's end
    old = state.counts[rows, token]
    full = (old & jnp.uint16(IN_OUTPUT)) == IN_OUTPUT
    counts = state.counts.at[place, token].set(
        jnp.where(full, old, old + jnp.uint16(1)), mode="drop"
    )
    latest = jnp.concatenate([state.rows.recent[rows, 1:], token[:, None]], axis=1)
    recent = state.rows.recent.at[place].set(latest, mode="drop")
    return SamplingState(dataclasses.replace(state.rows, recent=recent), counts, state.bias)


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    rows: Int[Array, " B"],
    position: Int[Array, " B"],
    *,
    logprobs_mode: str = "raw_logprobs",
    max_logprobs: int = 0,
) -> Choice:
    """Next token of each sequence; `position` is the index that it will have.

    rows: which row of the state is whose. The draw is Gumbel-max with a key made of the sequence's
    seed and the position alone: batch mates, row and padding do not matter. Values that are
    reported are those of the raw logits or of what is left after all filters, as `logprobs_mode`
    says, of at most `max_logprobs` tokens beside the chosen one.
    """
    _check_mode(logprobs_mode)
    raw = logits.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(raw), axis=-1)
    raw = jnp.where(finite[:, None], raw, 0.0)  # so that nothing below meets a NaN
    row = jax.tree.map(lambda table: table[rows], state.rows)
    adjusted = _adjusted(raw, state, rows, row, position)
    best = jnp.max(adjusted, axis=-1)
    possible = best > -jnp.inf
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    reports_processed = logprobs_mode.startswith("processed")

    def cold():
        return greedy, adjusted if reports_processed else None

    def draw():
        warm = row.temperature > 0
        scale = jnp.where(warm, row.temperature, 1.0)[:, None]
        # Relative to the likeliest token, so that a low temperature makes no infinity.
        tempered = (adjusted - jnp.where(possible, best, 0.0)[:, None]) / scale
        kept = _admitted(adjusted, tempered, row)
        noise = jax.vmap(lambda seed, at: _gumbel(seed, at, raw.shape[-1]))(row.seed, position)
        drawn = jnp.argmax(jnp.where(kept, tempered + noise, -jnp.inf), axis=-1)
        processed = tempered if logprobs_mode == "processed_logprobs" else adjusted / scale
        return (
            jnp.where(warm, drawn.astype(jnp.int32), greedy),
            jnp.where(kept, processed, -jnp.inf) if reports_processed else None,
        )

    token, processed = jax.lax.cond(jnp.any(row.temperature > 0), draw, cold)

    def report():
        values = processed if reports_processed else raw
        return token_logprobs(values, token, max_logprobs, logprobs_mode)

    def nothing():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(report))

    reported = jax.lax.cond(jnp.any(row.num_logprobs >= 0), report, nothing)
    return Choice(token, finite & possible, *reported)


def token_logprobs(
    logits: Float[Array, "T V"], targets: Int[Array, " T"], max_logprobs: int, mode: str
) -> tuple[Float[Array, " T"], Int[Array, " T"], Int[Array, "T L"], Float[Array, "T L"]]:
    """(value, rank, ids of the largest, their values) of one target for each row of logits.

    Values are log-probabilities, or the logits themselves in the modes named after them. The rank
    counts the tokens whose value is at least the target's. Of equal values the lower id is first.
    """
    _check_mode(mode)
    values = logits.astype(jnp.float32)
    if mode.endswith("logprobs"):
        values = jax.nn.log_softmax(values, axis=-1)
    place = jnp.maximum(targets, 0)[:, None]  # -1 where no target is wanted
    chosen = jnp.take_along_axis(values, place, axis=-1)
    rank = jnp.sum(values >= chosen, axis=-1, dtype=jnp.int32)
    top, ids = jax.lax.top_k(values, max_logprobs)
    return chosen[:, 0], rank, ids, top


def _check_mode(mode: str) -> None:
    if mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode={mode!r} must be one of {', '.join(LOGPROBS_MODES)}")


def _adjusted(
    logits: Float[Array, "B V"], state: SamplingState, rows, row: SamplingRows, position
) -> Float[Array, "B V"]:
    """Logits after masks, bias and penalties; as they are when no row has any of these."""
    early = position < row.min_length
    has_words = jnp.any(row.bad_words[..., -1] >= 0, axis=-1)
    has_penalties = (
        (row.repetition_penalty != 1.0)
        | (row.presence_penalty != 0.0)
        | (row.frequency_penalty != 0.0)
    )

    def adjust():
        count, vocab = logits.shape
        start, end = row.bad_words[..., :-1], row.bad_words[..., -1]
        follows = jnp.all((start < 0) | (start == row.recent[:, None]), axis=-1)
        masked = jnp.concatenate(
            [jnp.where(early[:, None], row.stop_ids, -1), jnp.where(follows, end, -1)], axis=1
        )
        masked = jnp.where(masked < 0, vocab, masked)  # off the end: -1 would be the last token
        each = jnp.arange(count, dtype=jnp.int32)[:, None]
        found = logits.at[each, masked].set(-jnp.inf, mode="drop")
        # Tables of a row without bias or penalties may hold anything, a NaN too.
        found = found + jnp.where(row.has_bias[:, None], state.bias[rows], 0.0)
        counts = state.counts[rows]
        times = (counts & jnp.uint16(IN_OUTPUT)).astype(jnp.float32)
        penalty = row.repetition_penalty[:, None]
        rescaled = jnp.where(found > 0, found / penalty, found * penalty)
        found = jnp.where(counts > 0, rescaled, found)
        found = found - row.frequency_penalty[:, None] * times
        found = found - jnp.where(times > 0, row.presence_penalty[:, None], 0.0)
        return jnp.minimum(found, LARGEST)  # a tiny repetition penalty makes infinities

    needed = jnp.any(early | has_words | row.has_bias | has_penalties)
    return jax.lax.cond(needed, adjust, lambda: logits)


def _admitted(
    logits: Float[Array, "B V"], tempered: Float[Array, "B V"], row: SamplingRows
) -> Bool[Array, "B V"]:
    """Which tokens pass min-p, then top-k, then top-p over what is left; always the likeliest.

    logits: in the order of `tempered`, whose values are relative to the largest and may be equal
    where these are not. top-k keeps all that equal the k-th. top-p drops from the least likely on,
    of equals the lower id first, while what is dropped has a probability of at most 1 - p.
    """
    count, vocab = logits.shape
    keys = _ordered_bits(logits)
    weight = jnp.exp(tempered)
    keep = weight >= row.min_p[:, None]
    nothing = jnp.zeros((count,), jnp.uint32)

    limited = (row.top_k > 0) & (row.top_k < vocab)

    def kth_largest():
        k = jnp.where(limited, row.top_k, 1).astype(jnp.uint32)
        found = _largest(lambda at: _sum(keys >= at[:, None]) >= k, count)
        return jnp.where(limited, found, 0)

    keep = keep & (keys >= jax.lax.cond(jnp.any(limited), kth_largest, lambda: nothing)[:, None])

    cut = row.top_p < 1.0  # rounding must not cut the tail of the others
    ids = jax.lax.broadcasted_iota(jnp.uint32, keys.shape, 1)

    def nucleus():
        threshold, first = _nucleus(keys, ids, jnp.where(keep, weight, 0.0), row.top_p)
        return jnp.where(cut, threshold, 0), jnp.where(cut, first, 0)

    threshold, first = jax.lax.cond(jnp.any(cut), nucleus, lambda: (nothing, nothing))
    threshold, first = threshold[:, None], first[:, None]
    return keep & ((keys > threshold) | ((keys == threshold) & (ids >= first)))


def _nucleus(
    keys: UInt32[Array, "B V"],
    ids: UInt32[Array, "B V"],
    weight: Float[Array, "B V"],
    top_p: Float[Array, " B"],
) -> tuple[UInt32[Array, " B"], UInt32[Array, " B"]]:
    """top-p keeps keys above the first result, and those equal to it from the id of the second on.

    weight: in the order of `keys`, 1 for the largest, 0 for what is dropped already.
    Weights become integers with a sum near 2^31: integers add up to the same in any order, so no
    shape or device changes what is kept.
    """
    count, vocab = keys.shape
    _, exponent = jnp.frexp(jnp.sum(weight, axis=-1))
    scale = jnp.ldexp(jnp.ones((count,), jnp.float32), 31 - exponent)
    parts = jnp.round(weight * scale[:, None]).astype(jnp.uint32)
    may_go = ((1.0 - top_p) * _sum(parts).astype(jnp.float32)).astype(jnp.uint32)

    def below(at):
        return _sum(jnp.where(keys < at[:, None], parts, 0))

    # The largest key of which all smaller ones may go is that of a token which may not go as a
    # whole; with a tiny p every token might.
    threshold = _largest(lambda at: below(at) <= may_go, count)
    threshold = jnp.minimum(threshold, jnp.max(keys, axis=-1))
    tied = keys == threshold[:, None]
    part = jnp.max(jnp.where(tied, parts, 0), axis=-1)
    gone = (may_go - below(threshold)) // jnp.maximum(part, 1)
    gone = jnp.minimum(gone, _sum(tied) - 1)
    first = _largest(
        lambda at: _sum(tied & (ids < at[:, None])) <= gone, count, bits=vocab.bit_length()
    )
    return threshold, first


def _sum(values: Array) -> UInt32[Array, " B"]:
    return jnp.sum(values, axis=-1, dtype=jnp.uint32)


def _largest(
    holds: Callable[[UInt32[Array, " B"]], Bool[Array, " B"]], count: int, bits: int = 32
) -> UInt32[Array, " B"]:
    """The largest numbers of so many bits for which `holds`, which does up to some number."""

    def step(i, found):
        bit = jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32)
        trial = found | bit
        return jnp.where(holds(trial), trial, found)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros((count,), jnp.uint32))


def _ordered_bits(values: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Integers in the order of the float32 numbers; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _gumbel(seed: UInt32[Array, " 2"], position, vocab: int):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed[0]), seed[1])
    key = jax.random.fold_in(key, position.astype(jnp.uint32))
    return jax.random.gumbel(key, (vocab,), jnp.float32)
