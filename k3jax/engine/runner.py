"""The runner: turns a schedule into calls of compiled programs, and their outputs into tokens.

It owns the device's side of the engine: weights, state, and one compiled program for each shape of
the profile. Programs are compiled before the first step and called as compiled objects, which
refuse a wrong shape instead of compiling again (S-10).
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from k3jax.engine.config import Profile
from k3jax.engine.programs import (
    DecodeInputs,
    Moves,
    PrefillInputs,
    PromptLogprobs,
    StepOptions,
    StepOutputs,
    make_programs,
)
from k3jax.engine.request import MAX_BAD_WORD_TOKENS
from k3jax.engine.sampling import RowRequest, needs_wide_row, pack_rows, wide_row
from k3jax.engine.scheduler import DecodeRow, PrefillRow, RowOutput, Schedule, TokenLogprobs
from k3jax.engine.state import EngineState, StateSizes, allocate_state, state_bytes
from k3jax.errors import EngineError
from k3jax.models.cache import Checkpoints
from k3jax.models.k3 import K3Model

logger = logging.getLogger(__name__)

MOVES = 64  # pages or slots of one kind that one call of `move` takes


@dataclass
class Step:
    """A step that the device has taken, and where its outputs will be."""

    schedule: Schedule
    outputs: StepOutputs | None
    prompt_logprobs: PromptLogprobs | None
    num_decode_rows: int  # of the program, padding included


class Runner:
    """The device's side of one engine. Not thread-safe."""

    def __init__(
        self,
        model: K3Model,
        sizes: StateSizes,
        profile: Profile,
        options: StepOptions,
        *,
        exports_per_segment: int,
        mla_scale: np.ndarray | None = None,
        lazy: bool = False,
    ):
        self.config, self.mesh = model.config, model.mesh
        self.sizes, self.profile, self.options = sizes, profile, options
        self._exports = exports_per_segment
        self._mla_scale = mla_scale
        graphdef, self.weights = model.split()
        self._functions = make_programs(graphdef, self.mesh, options)
        self._compiled: dict[tuple[str, Any], Any] = {}
        self._compiling = threading.Lock()
        self.state = self.new_state()
        if not lazy:
            self._compile_all()
            self._warm_up()

    def new_state(self) -> EngineState:
        """A state of zeros."""
        return allocate_state(self.config, self.sizes, mesh=self.mesh, mla_scale=self._mla_scale)

    # Steps.

    def dispatch(self, schedule: Schedule) -> Step:
        """Hands a step to the device and returns without waiting for it.

        If this or `results` raises, the state may be lost: `restart` makes a new one.
        """
        for moves in _moves(schedule):
            self.state = self._program("move")(self.state, moves)
        for row in schedule.prefill:
            if row.is_first and needs_wide_row(row.sequence.params, row.sequence.bad_word_ids):
                self._load_wide_row(row)
        outputs = prompt = None
        num_decodes = 0
        if schedule.prefill:
            num_decodes, num_tokens, num_rows = shape = self.profile.mixed_shape(
                len(schedule.decode),
                sum(row.num_tokens for row in schedule.prefill),
                len(schedule.prefill),
            )
            self.state, outputs, prompt = self._program("mixed", shape)(
                self.weights,
                self.state,
                self._decode_inputs(schedule.decode, num_decodes),
                self._prefill_inputs(schedule.prefill, num_tokens, num_rows),
            )
        elif schedule.decode:
            num_decodes = self.profile.decode_shape(len(schedule.decode))
            inputs = self._decode_inputs(schedule.decode, num_decodes)
            self.state, outputs = self._program("decode", num_decodes)(
                self.weights, self.state, inputs
            )
        if outputs is not None:
            outputs.tokens.copy_to_host_async()
        return Step(schedule, outputs, prompt, num_decodes)

    def results(self, step: Step) -> list[RowOutput]:
        """Waits for a step; what it did for each row, those that decode first."""
        if step.outputs is None:
            return []
        rows = step.schedule.rows
        padding = step.num_decode_rows - len(step.schedule.decode)
        tokens = np.asarray(step.outputs.tokens).tolist()
        wanted = any(row.sequence.params.logprobs is not None for row in rows)
        read = _Logprobs(step.outputs) if wanted else None
        found = []
        for index, row in enumerate(rows):
            place = index if index < len(step.schedule.decode) else index + padding
            *values, count, finite = tokens[place]
            logprobs = None
            number = row.sequence.params.logprobs
            if number is not None and read is not None:
                logprobs = [read.at(place, i, values[i], number) for i in range(count)]
            found.append(RowOutput(values[:count], bool(finite), logprobs))
        if step.prompt_logprobs is not None and any(
            row.sequence.params.prompt_logprobs is not None for row in step.schedule.prefill
        ):
            self._add_prompt_logprobs(step, found)
        return found

    def restart(self) -> None:
        """Gives up whatever is under way and makes the state anew, of zeros."""
        self.close()
        self.state = self.new_state()

    def close(self) -> None:
        """Gives the state's memory back."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    # Inputs.

    def _decode_inputs(self, rows: Sequence[DecodeRow], count: int) -> DecodeInputs:
        columns = np.zeros((4, count), np.int32)
        columns[3] = -1
        for i, row in enumerate(rows):
            columns[0, i] = row.sequence.row
            columns[1, i] = row.num_tokens
            if row.plan.new_pages:
                (page,) = row.plan.new_pages  # a loop is not longer than a page
                columns[2, i], columns[3, i] = row.plan.first_new_page, page
        return DecodeInputs(*columns)

    def _prefill_inputs(
        self, rows: Sequence[PrefillRow], num_tokens: int, count: int
    ) -> PrefillInputs:
        tokens = np.zeros(num_tokens, np.int32)
        targets = np.full(num_tokens, -1, np.int32)
        starts, lens, context, row_ids, slots, max_lengths = np.zeros((6, count), np.int32)
        samples = np.zeros(count, bool)
        tables = np.zeros((count, self.sizes.max_pages), np.int32)
        exports = np.zeros((3, count * max(1, self._exports)), np.int32)
        num_exports = at = 0
        packed: list[RowRequest] = []
        for i, row in enumerate(rows):
            sequence, end = row.sequence, row.start + row.num_tokens
            tokens[at : at + row.num_tokens] = sequence.chain.tokens[row.start : end]
            if sequence.params.prompt_logprobs is not None:
                known = sequence.chain.tokens[
                    row.start + 1 : min(end + 1, sequence.num_prompt_tokens)
                ]
                targets[at : at + len(known)] = known
            starts[i], lens[i], context[i] = at, row.num_tokens, row.start
            row_ids[i], slots[i], samples[i] = sequence.row, sequence.slot, row.samples
            max_lengths[i] = sequence.max_length
            tables[i, : len(sequence.pages)] = sequence.pages
            for export in row.plan.exports:
                exports[:, num_exports] = i, export.position - row.start, export.slot
                num_exports += 1
            first_output = max(
                sequence.num_prompt_tokens, len(sequence.chain) - MAX_BAD_WORD_TOKENS
            )
            packed.append(
                RowRequest(
                    sequence.params,
                    sequence.seed,
                    sequence.num_prompt_tokens,
                    tuple(sequence.stop_token_ids),
                    sequence.bad_word_ids,
                    sequence.chain.tokens[first_output:],
                )
            )
            at += row.num_tokens
        return PrefillInputs(
            tokens,
            starts,
            lens,
            context,
            row_ids,
            slots,
            max_lengths,
            samples,
            tables,
            Checkpoints(*exports),
            pack_rows(packed, count),
            targets,
        )

    def _load_wide_row(self, row: PrefillRow) -> None:
        sequence = row.sequence
        prompt, output = np.split(np.asarray(sequence.chain.tokens), [sequence.num_prompt_tokens])
        counts, bias = wide_row(
            sequence.params, prompt, output, sequence.bad_word_ids, self.config.vocab_size
        )
        self.state = self._program("wide")(self.state, np.int32(sequence.row), counts, bias)

    def _add_prompt_logprobs(self, step: Step, found: list[RowOutput]) -> None:
        assert step.prompt_logprobs is not None
        read = _Logprobs(step.prompt_logprobs)
        at = 0
        for row, output in zip(
            step.schedule.prefill, found[len(step.schedule.decode) :], strict=True
        ):
            number, chain = row.sequence.params.prompt_logprobs, row.sequence.chain.tokens
            if number is not None:
                output.first_prompt_position = row.start + 1
                last = min(row.start + row.num_tokens, row.sequence.num_prompt_tokens - 1)
                output.prompt_logprobs = [
                    read.at(at + position - row.start - 1, None, chain[position], number)
                    for position in range(row.start + 1, last + 1)
                ]
            at += row.num_tokens

    # Programs.

    def _program(self, name: str, shape: Any = None):
        program = self._compiled.get((name, shape))
        if program is None:  # only without compilation ahead of time
            with self._compiling:
                began = time.monotonic()
                program = self._lower(name, shape).compile(_compiler_options())
                self._compiled[name, shape] = program
                logger.info("compiled %s %s in %.1f s", name, shape, time.monotonic() - began)
        return program

    def _keys(self) -> Iterator[tuple[str, Any]]:
        yield "move", None
        yield "wide", None
        for count in self.profile.decode_rows:
            yield "decode", count
        for shape in self.profile.mixed_shapes():
            yield "mixed", shape

    def _example(self, name: str, shape: Any) -> tuple:
        """Inputs that are padding only: they change nothing but the reserved items."""
        if name == "move":
            return (_pack_moves([], [], [], []),)
        if name == "wide":
            vocab = self.config.vocab_size
            return np.int32(0), np.zeros(vocab, np.uint16), np.zeros(vocab, np.float32)
        if name == "decode":
            return (self._decode_inputs([], shape),)
        decodes, tokens, rows = shape
        return self._decode_inputs([], decodes), self._prefill_inputs([], tokens, rows)

    def _arguments(self, name: str, shape: Any) -> tuple:
        weights = (self.weights,) if name in ("mixed", "decode") else ()
        return (*weights, self.state, *self._example(name, shape))

    def _lower(self, name: str, shape: Any):
        return self._functions[name].lower(*self._arguments(name, shape))

    def _compile_all(self) -> None:
        """All programs side by side: compilation releases the interpreter lock."""
        began = time.monotonic()
        keys = list(self._keys())
        with ThreadPoolExecutor(min(16, len(keys))) as pool:
            futures = {}
            for key in keys:
                futures[key] = pool.submit(self._lower(*key).compile, _compiler_options())
            self._compiled = {key: future.result() for key, future in futures.items()}
        self._check_in_place()
        logger.info("compiled %d programs in %.1f s", len(keys), time.monotonic() - began)

    def _check_in_place(self) -> None:
        """S-12: no program copies the pools."""
        shards = 1 if self.mesh is None else self.mesh.size
        for key, program in self._compiled.items():
            analysis = program.memory_analysis()
            if analysis is None:  # this backend does not say
                return
            if analysis.alias_size_in_bytes * shards < state_bytes(self.state):
                raise EngineError(f"the program {key} does not update the engine's state in place")

    def _warm_up(self) -> None:
        """Runs each program once on padding: first runs load code and allocate (S-11)."""
        for (name, shape), program in self._compiled.items():
            outputs = program(*self._arguments(name, shape))
            self.state = outputs if name in ("move", "wide") else outputs[0]
        jax.block_until_ready(self.state)


class _Logprobs:
    """Logprobs of a step, on the host."""

    def __init__(self, outputs: StepOutputs | PromptLogprobs):
        self._logprobs, self._ranks, self._ids, self._tops = (
            np.asarray(x)
            for x in (outputs.logprobs, outputs.ranks, outputs.top_ids, outputs.top_logprobs)
        )

    def at(self, row: int, step: int | None, token_id: int, number: int) -> TokenLogprobs:
        """Of one chosen token, and of the `number` likeliest ones there."""
        place = row if step is None else (row, step)
        return TokenLogprobs(
            token_id,
            float(self._logprobs[place]),
            int(self._ranks[place]),
            list(
                zip(
                    self._ids[place][:number].tolist(),
                    self._tops[place][:number].tolist(),
                    strict=True,
                )
            ),
        )


def _moves(schedule: Schedule) -> Iterator[Moves]:
    """The plan's moves, in calls of at most `MOVES` of each kind."""
    plan = schedule.plan
    lists: tuple[list, ...] = (
        plan.zero_pages,
        plan.zero_slots,
        [(copy.source, copy.target, copy.num_tokens) for copy in plan.page_copies],
        [(copy.source, copy.target) for copy in plan.slot_copies],
    )
    for start in range(0, max(map(len, lists)), MOVES):
        yield _pack_moves(*(items[start : start + MOVES] for items in lists))


def _pack_moves(zero_pages, zero_slots, page_copies, slot_copies) -> Moves:
    lists = (zero_pages, zero_slots, page_copies, slot_copies)
    arrays = [np.zeros((MOVES, *width), np.int32) for width in ((), (), (3,), (2,))]
    for array, items in zip(arrays, lists, strict=True):
        if items:
            array[: len(items)] = items
    return Moves(np.asarray([len(items) for items in lists], np.int32), *arrays)


def _compiler_options() -> dict[str, Any] | None:
    """On the CPU, LLVM's first level compiles a sixth quicker, and the code is no slower."""
    return {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
