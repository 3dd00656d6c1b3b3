"""Settings of an engine, with vLLM's names, and the shapes of its programs. Imports no jax."""

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from k3jax.cache import CacheSettings, parse_retention_interval
from k3jax.engine.scheduler import SchedulerSettings
from k3jax.errors import ConfigError
from k3jax.flags import flag

KDA_CHUNK = 64  # tokens of a chunk of the KDA prefill; states can be exported at its multiples


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine may hold and do."""

    dtype: str = "auto"  # of weights and activations, for example bfloat16 or float32; auto takes
    # the checkpoint's
    max_model_len: int | None = None  # most tokens of prompt and answer together (default: the
    # model's own limit, at most 8192 on a CPU)
    max_num_seqs: int | None = None  # sequences that run at once (default: 64, on a CPU 8)
    max_num_batched_tokens: int | None = None  # tokens of one step (default: 2048, on a CPU 256)
    gpu_memory_utilization: float = 0.9  # share of the device's memory that the engine may use
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"  # of MLA rows; auto takes that of the model
    kv_cache_scales: str | None = (
        None  # JSON list with one scale for each MLA layer of an fp8 cache
    )
    # (default: 1 for all)
    mamba_ssm_cache_dtype: Literal["float32", "bfloat16"] = "float32"  # of KDA states between steps
    block_size: int = 64  # tokens of a page of the MLA cache
    prefix_match_unit: int | None = None  # tokens by which prefixes are hashed and found; divides
    # or is a multiple of the block size (default: the block size)
    enable_prefix_caching: bool = True  # let requests resume from prefixes that were computed
    prefix_cache_retention_interval: str | None = None  # tokens between KDA states that are kept on
    # the way, "dense" for every 64th position (default: 0, only where a prompt or an answer ends,
    # or a prefix was seen twice)
    max_pinned_fraction: float = 0.2  # of the cache that requests may pin
    kv_pages: int | None = None  # pages of the MLA cache (default: what memory allows)
    kda_slots: int | None = None  # KDA states, running ones and snapshots (default: what memory
    # allows)
    expected_request_len: int = 8192  # tokens of a usual request, to divide memory between pages
    # and states
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # who is served first: the first come,
    # or the lowest number in the request's field priority
    async_scheduling: bool = True  # prepare a step while the one before it runs
    num_scheduler_steps: int = 8  # tokens that one call of the device may generate for a sequence
    # while nothing else waits
    enforce_eager: bool = False  # compile a program when it is first needed, not before the start
    compile_profile: Literal["auto", "tiny", "full"] = "auto"  # how many shapes are compiled: tiny
    # starts quickly, full wastes less; auto is tiny on a CPU
    logprobs_mode: Literal[
        "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
    ] = "raw_logprobs"  # what requests get that ask for logprobs
    max_logprobs: int = 20  # most alternatives that a request may ask for at each position
    seed: int | None = None  # makes requests without a seed of their own the same in every run

    def __post_init__(self):
        for name, low in {
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 1,
            "prefix_match_unit": 1,
            "kv_pages": 2,
            "kda_slots": 2,
            "expected_request_len": 1,
            "num_scheduler_steps": 1,
            "max_logprobs": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{flag(name)} {value} must be at least {low}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"{flag('gpu_memory_utilization')} {self.gpu_memory_utilization} must be in (0, 1]"
            )
        if self.num_scheduler_steps > self.block_size:
            raise ConfigError(
                f"{flag('num_scheduler_steps')} {self.num_scheduler_steps} must not exceed "
                f"{flag('block_size')} {self.block_size}"
            )
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "fp8":
            raise ConfigError(f"{flag('kv_cache_scales')} needs {flag('kv_cache_dtype')} fp8")
        parse_retention_interval(self.prefix_cache_retention_interval)

    def resolve(self, *, on_cpu: bool, model_limit: int) -> "EngineLimits":
        """The sizes of steps for a machine and a model; refuses what contradicts itself."""
        max_model_len = self.max_model_len
        if max_model_len is None:
            max_model_len = min(model_limit, 8192) if on_cpu else model_limit
        if max_model_len > model_limit:
            raise ConfigError(
                f"{flag('max_model_len')} {max_model_len} exceeds the model's own limit of "
                f"{model_limit} (max_position_embeddings)"
            )
        unit = self.prefix_match_unit or self.block_size
        alignment = math.lcm(unit, KDA_CHUNK)
        num_seqs = self.max_num_seqs or (8 if on_cpu else 64)
        if self.kda_slots is not None and self.kda_slots <= num_seqs:
            raise ConfigError(
                f"{flag('kda_slots')} {self.kda_slots} must exceed {flag('max_num_seqs')} "
                f"{num_seqs}: every running sequence has one, and one is reserved"
            )
        num_tokens = self.max_num_batched_tokens
        if num_tokens is None:
            num_tokens = max(256 if on_cpu else 2048, num_seqs + alignment)
        if num_tokens < num_seqs + alignment:
            raise ConfigError(
                f"{flag('max_num_batched_tokens')} {num_tokens} must be at least "
                f"{num_seqs + alignment}: one token for each of {num_seqs} sequences "
                f"({flag('max_num_seqs')}) and a prefill piece of {alignment}"
            )
        tiny = on_cpu if self.compile_profile == "auto" else self.compile_profile == "tiny"
        make = Profile.tiny if tiny else Profile.full
        return EngineLimits(max_model_len, num_seqs, num_tokens, unit, make(num_seqs, num_tokens))

    def cache_settings(self, limits: "EngineLimits", num_pages: int, num_slots: int):
        """Settings of the cache manager."""
        return CacheSettings(
            num_pages=num_pages,
            num_slots=num_slots,
            page_size=self.block_size,
            match_unit=limits.match_unit,
            kda_chunk=KDA_CHUNK,
            enable_prefix_caching=self.enable_prefix_caching,
            retention_interval=parse_retention_interval(self.prefix_cache_retention_interval),
            max_pinned_fraction=self.max_pinned_fraction,
        )

    def scheduler_settings(self, limits: "EngineLimits") -> SchedulerSettings:
        """Settings of the scheduler."""
        return SchedulerSettings(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_prefill_rows=limits.profile.prefill_rows[-1],
            num_decode_steps=self.num_scheduler_steps,
            policy=self.scheduling_policy,
        )


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of steps, with nothing left open."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    match_unit: int
    profile: "Profile"


@dataclass(frozen=True)
class Profile:
    """The static shapes that are compiled; a step takes the smallest that holds it."""

    decode_rows: tuple[int, ...]  # of a decode program
    prefill_tokens: tuple[int, ...]  # of a mixed program, with the next two
    prefill_rows: tuple[int, ...]
    mixed_decode_rows: tuple[int, ...]

    @classmethod
    def tiny(cls, max_num_seqs: int, max_num_batched_tokens: int) -> "Profile":
        """Three programs that do everything, for a laptop or a notebook."""
        rows = tuple(sorted({1, max_num_seqs}))
        return cls(rows, (max_num_batched_tokens,), (min(4, max_num_seqs),), rows[-1:])

    @classmethod
    def full(cls, max_num_seqs: int, max_num_batched_tokens: int) -> "Profile":
        """The ladders of a server: little padding at every load."""
        rows = [1, 2, 4, 8, 16, 24, 32, 48, 64]
        while rows[-1] < max_num_seqs:
            rows.append(rows[-1] + max(32, rows[-1] // 2))
        rows = [count for count in rows if count < max_num_seqs] + [max_num_seqs]
        tokens, size = [], 64
        while size < max_num_batched_tokens:
            tokens.append(size)
            if size >= 1024 and size * 3 // 2 < max_num_batched_tokens:
                tokens.append(size * 3 // 2)
            size *= 2
        return cls(
            tuple(rows),
            (*tokens, max_num_batched_tokens),
            tuple(sorted({1, min(8, max_num_seqs)})),
            (0, max_num_seqs),
        )

    def decode_shape(self, num_rows: int) -> int:
        """B for so many rows."""
        return _fitting(self.decode_rows, num_rows)

    def mixed_shape(self, num_decodes: int, num_tokens: int, num_rows: int) -> tuple[int, int, int]:
        """(D, T, P) for so many decodes, known tokens and sequences that compute them."""
        return (
            _fitting(self.mixed_decode_rows, num_decodes),
            _fitting(self.prefill_tokens, num_tokens),
            _fitting(self.prefill_rows, num_rows),
        )

    def mixed_shapes(self) -> list[tuple[int, int, int]]:
        """All of them."""
        return [
            (decodes, tokens, rows)
            for decodes in self.mixed_decode_rows
            for tokens in self.prefill_tokens
            for rows in self.prefill_rows
        ]


def _fitting(ladder: tuple[int, ...], size: int) -> int:
    return ladder[bisect.bisect_left(ladder, size)]
