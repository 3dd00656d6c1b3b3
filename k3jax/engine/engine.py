"""The engine: requests in, tokens out, one step at a time.

It ties the host's scheduler and cache manager to the device's runner. A turn (`Engine.step`)
prepares and dispatches a step, then takes in the results of the step before it while the new one
runs. `LLM` drives it in the caller's thread, `AsyncEngine` in one of its own.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.cache import (
    CacheManager,
    CacheRequest,
    CacheSettings,
    HashChain,
    Root,
    check_cache_salt,
    split_memory,
)
from k3jax.config import K3Config
from k3jax.engine.config import KDA_CHUNK, EngineConfig, EngineLimits
from k3jax.engine.inputs import check_ids
from k3jax.engine.output import Output, OutputStep, Version
from k3jax.engine.programs import StepOptions
from k3jax.engine.request import RequestOptions, check_bad_word_ids
from k3jax.engine.runner import Runner, Step
from k3jax.engine.sampling import MAX_STOP_IDS
from k3jax.engine.scheduler import RowOutput, Scheduler, SequenceState, Taken
from k3jax.engine.state import StateSizes, slot_and_page_bytes
from k3jax.engine.weights import new_weights
from k3jax.errors import ConfigError, EngineError, RequestError
from k3jax.models.k3 import K3Model

logger = logging.getLogger(__name__)

MAX_DEVICE_ERRORS = 3  # that a request may meet before it is given up
CPU_CACHE_BYTES = 512 << 20  # of both pools, on a machine whose memory is everybody's


DEFAULT_OPTIONS = RequestOptions()
DEFAULT_CONFIG = EngineConfig()
Listener = Callable[[OutputStep], None]


@dataclass(eq=False)
class EngineRequest:
    """One output that an engine generates: what `prepare` makes, `add` takes and `abort` ends."""

    output: Output
    options: RequestOptions
    sequence: SequenceState
    listener: Listener | None = None  # hears of its steps, the last one included


class Engine:
    """Generates tokens for many requests at once. Not thread-safe: one thread owns it."""

    def __init__(self, model: K3Model, config: EngineConfig = DEFAULT_CONFIG):
        self.config = config
        self.model_config = model.config
        on_cpu = jax.default_backend() == "cpu"
        limits = config.resolve(on_cpu=on_cpu, model_limit=model.config.max_position_embeddings)
        sizes = _sizes(model, config, limits, on_cpu=on_cpu)
        settings = config.cache_settings(limits, sizes.num_pages, sizes.num_slots)
        limits = self.limits = _fitted(limits, config, settings)
        self.cache = CacheManager(settings)
        self.scheduler = Scheduler(config.scheduler_settings(limits), self.cache)
        options = StepOptions(
            logprobs_mode=config.logprobs_mode,
            max_logprobs=config.max_logprobs,
            num_decode_steps=config.num_scheduler_steps,
            aligned=limits.match_unit % KDA_CHUNK == 0,
        )
        scales = _read_scales(config, model.config)
        self.runner = Runner(
            model,
            sizes,
            limits.profile,
            options,
            exports_per_segment=settings.exports_per_segment,
            mla_scale=scales,
            lazy=config.enforce_eager,
        )
        self.weight_version: Version = 0
        self._root = Root(
            _fingerprint(model.config),
            mla_dtype=str(sizes.mla_dtype),
            mla_scales=() if scales is None else tuple(map(repr, scales.tolist())),
            state_dtype=str(sizes.state_dtype),
        )
        self._seeds = None if config.seed is None else random.Random(config.seed)
        self._numbers = itertools.count(1)
        self._live: dict[SequenceState, EngineRequest] = {}
        self._under_way: deque[Step] = deque()
        self._num_requests = 0
        self._num_failures = 0  # device errors since a step last succeeded
        logger.info("cache: %s", settings.describe())

    @classmethod
    def from_pretrained(cls, path, config: EngineConfig = DEFAULT_CONFIG, *, mesh=None) -> "Engine":
        """Loads a checkpoint folder and compiles the step programs."""
        dtype = None if config.dtype == "auto" else config.dtype
        return cls(K3Model.from_pretrained(path, dtype=dtype, mesh=mesh), config)

    # What the server needs to know.

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model_config.vocab_size

    # Requests.

    def prepare(self, output: Output, options: RequestOptions = DEFAULT_OPTIONS) -> EngineRequest:
        """Checks a request and hashes its prompt. Any thread may do this.

        What this engine cannot do is refused by a `RequestError` that names the field.
        """
        params, prompt = output.params, output.prompt_ids
        if not len(prompt):
            raise RequestError("the prompt is empty", field="prompt")
        check_ids("prompt", prompt, self.vocab_size)
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise RequestError(
                f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed the "
                f"{self.max_model_len} tokens of max_model_len",
                field="prompt" if len(prompt) >= self.max_model_len else "max_tokens",
            )
        self.cache.check_fits(len(prompt), params.max_tokens)
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(params, field)
            if value is not None and value > self.config.max_logprobs:
                raise RequestError(
                    f"{field}={value} exceeds the engine's max_logprobs={self.config.max_logprobs}",
                    field=field,
                )
        if params.n > 1:
            raise RequestError("an output is one of n: its own n is 1", field="n")
        check_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        params.check_vocabulary(self.vocab_size)
        if params.bad_words and not output.bad_word_ids:
            raise RequestError("bad_words need a tokenizer", field="bad_words")
        check_bad_word_ids(output.bad_word_ids)
        for ids in output.bad_word_ids:
            check_ids("bad_words", ids, self.vocab_size)
        if len(output.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(output.stop_token_ids)} stop tokens; at most {MAX_STOP_IDS} are possible",
                field="stop_token_ids",
            )
        if options.priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                "priority has no effect under the scheduling policy fcfs of this engine: leave it "
                "out, or start the engine with scheduling_policy=priority",
                field="priority",
            )
        check_cache_salt(options.cache_salt)
        chain = HashChain(self._root_of(options), self.limits.match_unit, map(int, prompt))
        cache = CacheRequest(
            f"request-{next(self._numbers)}",
            chain,
            num_prompt_tokens=len(prompt),
            checkpoints=options.cache_checkpoints,
            pin_ttl_s=options.cache_pin_ttl_s,
            priority=options.cache_priority,
            read_cache=params.prompt_logprobs is None,
        )
        sequence = SequenceState(
            cache,
            params,
            output.stop_token_ids,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            priority=options.priority,
            bad_word_ids=output.bad_word_ids,
        )
        return EngineRequest(output, options, sequence)

    def add(self, request: EngineRequest, listener: Listener) -> None:
        """Queues a prepared request."""
        sequence = request.sequence
        if sequence.chain.root.weight_version != self.weight_version:
            self._change_root(request)
        if self._seeds is not None and request.output.params.seed is None:
            sequence.seed = self._seeds.getrandbits(64)
        self._num_requests += 1
        sequence.arrival = self._num_requests
        request.listener = listener
        self._live[sequence] = request
        self.scheduler.add(sequence)

    def abort(self, request: EngineRequest, reason: str = "abort") -> None:
        """Ends a request in any state; one that has ended is left as it is (S-3)."""
        if self._live.pop(request.sequence, None) is not None:
            self.scheduler.abort(request.sequence)
            self._tell(request, request.output.end(reason))

    def explain(self, request: EngineRequest) -> str:
        """Why the prefix of a request was found in the cache, or not."""
        return str(self.cache.explain(request.sequence.cache))

    def _tell(self, request: EngineRequest, step: OutputStep) -> None:
        assert request.listener is not None, "the request was added"
        request.listener(step)

    # Steps.

    @property
    def num_waiting(self) -> int:
        """Requests that have no memory yet."""
        return len(self.scheduler.waiting)

    @property
    def num_free_rows(self) -> int:
        """So many more requests may run beside those that do."""
        return self.scheduler.num_free_rows

    @property
    def has_work(self) -> bool:
        """There is something to compute, or to wait for."""
        return bool(self._live or self._under_way)

    def step(self) -> None:
        """One turn: dispatches the next step, and takes in the one before it.

        A step that generates several tokens for a row is waited for before the next is prepared:
        where its rows end is known to the device only.
        """
        scheduler = self.scheduler
        if self._under_way and (scheduler.is_starved or not self._may_run_ahead()):
            self._collect_all()
        schedule = scheduler.schedule() if self._live else None
        if schedule is None:
            if not self._under_way and scheduler.has_work and not scheduler.is_starved:
                raise EngineError("no request can go on, though memory is free")  # S-5
            self._collect_all()
            return
        try:
            step = self.runner.dispatch(schedule)
        except RuntimeError as error:  # of the device; anything else is a fault of ours
            self._recover(error)
            return
        scheduler.dispatched(schedule)
        self._under_way.append(step)
        while len(self._under_way) > 1:
            self._collect()

    def _may_run_ahead(self) -> bool:
        return self.config.async_scheduling and all(
            row.num_tokens == 1 for step in self._under_way for row in step.schedule.decode
        )

    def _collect_all(self) -> None:
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        """Takes in the results of the oldest step under way."""
        step = self._under_way.popleft()
        try:
            results = self.runner.results(step)
        except RuntimeError as error:
            self._recover(error)
            return
        self._num_failures = 0
        self.scheduler.commit(step.schedule, results, self._take)

    def _take(self, sequence: SequenceState, result: RowOutput) -> Taken:
        """New tokens of one sequence on their way to whoever listens."""
        request = self._live[sequence]
        output = request.output
        output.num_cached_tokens = sequence.cache.num_cached_tokens
        if output.prompt_logprobs is not None and result.prompt_logprobs:
            # A preempted request computes its prompt again.
            known = len(output.prompt_logprobs)
            first = result.first_prompt_position - 1
            output.prompt_logprobs += result.prompt_logprobs[max(0, known - first) :]
        if not result.finite:
            self._end(sequence, "error", "the model's numbers are not finite")
            return Taken(0, ends=True)
        if not result.token_ids:
            return Taken(0, ends=False)
        try:
            step = output.feed(result.token_ids, result.logprobs, self.weight_version)
        except Exception:  # of a reader: no other request need suffer for it
            logger.exception("the tokens of %s cannot be read", sequence.request_id)
            self._end(sequence, "error", "the generated tokens could not be read")
            return Taken(0, ends=True)
        ends = step.finish_reason is not None
        if ends:
            del self._live[sequence]
        self._tell(request, step)
        return Taken(len(step.token_ids), ends)

    def _end(self, sequence: SequenceState, reason: str, error: str) -> None:
        request = self._live.pop(sequence)
        self._tell(request, request.output.end(reason, error))

    def _recover(self, error: RuntimeError) -> None:
        """A step failed and the pools with it (O-3): whatever ran is computed again from its
        tokens. A request that meets too many such failures ends, others go on."""
        self._num_failures += 1
        if self._num_failures > 2 * MAX_DEVICE_ERRORS:
            raise EngineError(f"the device fails at every step: {error}") from error
        logger.error("a step failed; its requests are computed again", exc_info=error)
        self._under_way.clear()
        self.runner.restart()
        for sequence in self.scheduler.restart():
            if sequence.num_device_errors >= MAX_DEVICE_ERRORS:
                self.scheduler.abort(sequence)
                self._end(sequence, "error", "the device failed while this request ran")

    # Weights.

    def update_weights(self, weights: Any, version: Version | None = None) -> None:
        """Swaps weights between two steps, and forgets every prefix of the old ones.

        weights: a K3Model, an nnx.State of one, or a mapping from parameter names
        ("layers.0.self_attn.q_proj.weight") to arrays; what it leaves out stays. Arrays are
        copied: the caller's stay valid. version: its name; by default the last one plus 1.

        Requests that run are computed again from their tokens with the new weights and go on;
        `Output.weight_versions` says which weights chose each token.
        """
        if version is None:
            version = self.weight_version + 1 if isinstance(self.weight_version, int) else 1
        if version == self.weight_version:
            raise ConfigError(
                f"version {version!r} is the one in use: give the new weights another"
            )
        self._collect_all()
        changed = new_weights(self.runner.weights, weights)
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)
        self.runner.weights = changed
        self.weight_version = version
        self.reset_prefix_cache()
        for request in self._live.values():
            self._change_root(request)

    def close(self) -> None:
        """Gives the device's memory back. Nothing can be computed after it."""
        self._under_way.clear()
        for request in list(self._live.values()):
            self.abort(request)
        self.runner.close()

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes; requests that run go on."""
        self.cache.reset()

    def _change_root(self, request: EngineRequest) -> None:
        """Its prefix counts for the weights in use from now on. It holds no memory."""
        cache = request.sequence.cache
        cache.chain = HashChain(
            self._root_of(request.options), self.limits.match_unit, cache.chain.tokens
        )

    def _root_of(self, options: RequestOptions) -> Root:
        return dataclasses.replace(
            self._root, weight_version=self.weight_version, cache_salt=options.cache_salt
        )


def _fingerprint(config: K3Config) -> str:
    """Of the model: of its configuration, since a cache does not outlive its engine and weights
    have a version of their own."""
    return hashlib.blake2b(repr(config).encode(), digest_size=16).hexdigest()


def _read_scales(config: EngineConfig, model_config: K3Config) -> np.ndarray | None:
    """Scales of an fp8 cache, float32 [MLA layers]."""
    if config.kv_cache_dtype != "fp8":
        return None
    count = model_config.layer_types.count("mla")
    if config.kv_cache_scales is None:
        return np.ones(count, np.float32)
    file = Path(config.kv_cache_scales)
    try:
        scales = np.asarray(json.loads(file.read_text(encoding="utf-8")), np.float64)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--kv-cache-scales {file}: not a JSON list of numbers ({error})"
        ) from None
    if scales.shape != (count,) or not np.all(np.isfinite(scales) & (scales > 0)):
        raise ConfigError(
            f"--kv-cache-scales {file}: must hold {count} numbers above 0, one for each MLA layer"
        )
    return scales.astype(np.float32)


def _fitted(limits: EngineLimits, config: EngineConfig, settings: CacheSettings) -> EngineLimits:
    """Limits for a pool of this size: one request may fill it."""
    room = (settings.num_pages - 1) * settings.page_size
    if limits.max_model_len <= room:
        return limits
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {limits.max_model_len} exceeds the {room} tokens of the cache's "
            f"{settings.num_pages - 1} pages: lower it, or raise --kv-pages or "
            "--gpu-memory-utilization"
        )
    logger.warning("max_model_len is lowered to %d, what the cache holds", room)
    return dataclasses.replace(limits, max_model_len=room)


def _sizes(model: K3Model, config: EngineConfig, limits, *, on_cpu: bool) -> StateSizes:
    """The sizes of the state: given ones, or what memory allows."""
    max_pages = -(-limits.max_model_len // config.block_size)
    sizes = StateSizes(
        num_rows=limits.max_num_seqs,
        num_slots=config.kda_slots or 0,
        num_pages=config.kv_pages or 0,
        page_size=config.block_size,
        max_pages=max_pages,
        dtype=model.dtype,
        mla_dtype=jnp.dtype(jnp.float8_e4m3fn) if config.kv_cache_dtype == "fp8" else model.dtype,
        state_dtype=jnp.dtype(config.mamba_ssm_cache_dtype),
    )
    if sizes.num_slots and sizes.num_pages:
        return sizes
    shards = 1 if model.mesh is None else model.mesh.shape["tp"]
    slot_bytes, page_bytes = slot_and_page_bytes(model.config, sizes, shards)
    num_pages, num_slots = split_memory(
        _cache_bytes(config, on_cpu=on_cpu),
        slot_bytes=slot_bytes,
        page_bytes=page_bytes,
        page_size=config.block_size,
        expected_request_len=min(config.expected_request_len, limits.max_model_len),
        slots_per_request=4.0,
    )
    # More than this is of no use: eight contexts for each row, and as many snapshots.
    num_pages = min(num_pages, 1 + 8 * limits.max_num_seqs * max_pages)
    num_slots = min(num_slots, 1 + 8 * limits.max_num_seqs)
    found = dataclasses.replace(
        sizes,
        num_slots=sizes.num_slots or num_slots,
        num_pages=sizes.num_pages or num_pages,
    )
    if found.num_slots <= limits.max_num_seqs:
        raise ConfigError(
            f"memory suffices for {found.num_slots - 1} KDA states, fewer than --max-num-seqs "
            f"{limits.max_num_seqs}: lower that, or raise --gpu-memory-utilization or --kda-slots"
        )
    return found


def _cache_bytes(config: EngineConfig, *, on_cpu: bool) -> int:
    """Memory for both pools on one device."""
    statistics = None if on_cpu else jax.local_devices()[0].memory_stats()
    if not statistics:
        return CPU_CACHE_BYTES
    total = statistics["bytes_limit"]
    free = int(config.gpu_memory_utilization * total) - statistics["bytes_in_use"]
    free -= total // 16  # activations of a step
    if free <= 0:
        raise ConfigError(
            f"the weights leave no memory for the cache within --gpu-memory-utilization "
            f"{config.gpu_memory_utilization}"
        )
    return free
