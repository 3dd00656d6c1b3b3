"""The engine: throughput beside transformers, host time, prefix reuse, compilations, leaks.

On a CPU every part runs, in one process:

  throughput  closed loops of 1, 8 and 32 clients whose requests differ in length, against
              `generate` of transformers on full batches of the mean length (same checkpoint)
  host        processor time of scheduler, cache and inputs per decode step at batch 32, beside the
              decode step of a model of k3-mini's size; and at 1 M tokens of context beside 1 K
  turns       time to the first token of a 4 K-token chat, and of its second turn
  prefix      50 users of one system prompt: share of prompt tokens found, by retention policy
  soak        10,000 short requests, many of them aborted: memory, pages and slots at the end

On a GPU, `--parts slice` runs the first four layers of K3 at full width with random weights: decode
at batch 1, 8, 64 and a prefill of 8 K tokens, with the memory floor beside each figure.
"""

import functools
import pathlib
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from k3jax.benchmarking import PeerModel, report, timed
from k3jax.config import K3Config, LinearAttentionConfig, QuantizationConfig
from k3jax.errors import ConfigError
from k3jax.flags import parse_flags, run_script

DEFAULT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "kimi_linear"
PARTS = ("throughput", "host", "turns", "prefix", "soak", "slice")


def mini(num_layers: int = 8, vocab_size: int = 8192) -> K3Config:
    """The size of the model that k3jax ships, about 20 million parameters; or a part of it."""
    layers = range(1, num_layers + 1)
    return K3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=96,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        linear_attn_config=LinearAttentionConfig(
            num_heads=2,
            head_dim=128,
            kda_layers=tuple(layer for layer in layers if layer % 4),
            full_attn_layers=tuple(layer for layer in layers if layer % 4 == 0),
            use_full_rank_gate=True,
            gate_lower_bound=-5.0,
        ),
        mla_use_output_gate=True,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=4,
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=128,
        routed_expert_hidden_size=128,
        latent_moe_use_norm=True,
        num_expert_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=1 << 20,
        dtype="float32",
        quantization_config=QuantizationConfig(),
    )


@dataclass
class Flags:
    """Measures the engine."""

    parts: tuple[str, ...] = ()  # throughput host turns prefix soak slice; all but slice if absent
    model: str = str(DEFAULT)  # checkpoint of the throughput part, Kimi-Linear layout
    seconds: float = 8.0  # length of a throughput measurement
    requests: int = 10_000  # of the soak part
    peer: bool = True  # run transformers too (needs the bench extra)
    save: bool = False  # keep the result under benchmarks/results


def main() -> None:
    flags = parse_flags(Flags)
    parts = flags.parts or PARTS[:-1]
    if unknown := set(parts) - set(PARTS):
        raise ConfigError(f"--parts {sorted(unknown)}: there are {PARTS}")
    rows: list[dict] = []
    for part in parts:
        rows += globals()[f"measure_{part}"](flags)
    name = "engine" if "slice" not in parts else "engine-slice"
    report(name, rows, save=flags.save)


# Clients.


def add(engine, prompt, max_tokens: int, listener=None, **options):
    """A greedy request that runs to max_tokens."""
    from k3jax.engine.output import Output, TextReader
    from k3jax.engine.request import RequestOptions, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    output = Output(prompt, params, frozenset(), TextReader(None, params))
    request = engine.prepare(output, RequestOptions(**options))
    engine.add(request, listener or (lambda step: None))
    return request


def drain(engine) -> None:
    while engine.has_work:
        engine.step()


def make_engine(model, **settings):
    from k3jax.engine.config import EngineConfig
    from k3jax.engine.engine import Engine

    return Engine(model, EngineConfig(**settings))


def random_model(config: K3Config):
    from k3jax.models.k3 import K3Model

    return K3Model.init(config, seed=0)


# Parts.


def measure_throughput(flags: Flags) -> Iterator[dict]:
    """Tokens a second of closed loops, and of the peer's full batches."""
    from k3jax.engine.compile_cache import num_compilations
    from k3jax.models.k3 import K3Model

    model = K3Model.from_pretrained(flags.model, dtype="float32")
    peer = PeerModel(flags.model) if flags.peer else None
    vocab_size = model.config.vocab_size
    for clients in (1, 8, 32):
        engine = make_engine(model, max_num_seqs=clients, max_model_len=512)
        rng = random.Random(0)
        before = num_compilations()
        closed_loop(engine, rng, clients, vocab_size, seconds=1.0)
        tokens, seconds = closed_loop(engine, rng, clients, vocab_size, seconds=flags.seconds)
        row: dict[str, object] = {
            "case": f"throughput, {clients} clients",
            "k3jax_tok_s": tokens / seconds,
            "compilations": num_compilations() - before,
        }
        if peer is not None:
            ids = np.random.default_rng(0).integers(3, vocab_size, (clients, MEAN_PROMPT))
            times = timed(functools.partial(peer.generate, ids, MEAN_OUTPUT), repeats=3)
            rate = clients * MEAN_OUTPUT / times["median_s"]
            row |= {"peer_tok_s": rate, "ratio": tokens / seconds / rate}
        yield row


MEAN_PROMPT, MEAN_OUTPUT = 48, 64


def closed_loop(engine, rng, clients: int, vocab_size: int, *, seconds: float) -> tuple[int, float]:
    """Every client sends its next request when it has the answer, after a short thought. Returns
    (tokens that were generated, seconds)."""
    generated = 0
    due = [rng.random() * 0.02 for _ in range(clients)]  # when each client sends
    start = time.perf_counter()

    def listener(client: int):
        def listen(step) -> None:
            nonlocal generated
            generated += len(step.token_ids)
            if step.finish_reason is not None:
                due[client] = time.perf_counter() - start + rng.random() * 0.005

        return listen

    while (now := time.perf_counter() - start) < seconds:
        for client, at in enumerate(due):
            if at <= now:
                due[client] = float("inf")
                length = rng.randrange(MEAN_PROMPT // 2, MEAN_PROMPT * 3 // 2)
                prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
                count = rng.randrange(MEAN_OUTPUT // 2, MEAN_OUTPUT * 3 // 2)
                add(engine, prompt, count, listener(client))
        if engine.has_work:
            engine.step()
    took, count = time.perf_counter() - start, generated
    drain(engine)
    return count, took


class HostClock:
    """Processor time of this thread in `engine.step`, without the calls of device programs."""

    def __init__(self, engine):
        self.engine, self.inside, self.steps = engine, 0.0, 0
        runner = engine.runner
        for key, program in list(runner._compiled.items()):
            runner._compiled[key] = self._timed(program)
        self._results = runner.results
        runner.results = self._waited

    def _timed(self, program):
        def call(*arguments):
            start = time.thread_time()
            try:
                return program(*arguments)
            finally:
                self.inside += time.thread_time() - start

        return call

    def _waited(self, step):
        import jax

        start = time.thread_time()
        jax.block_until_ready(step.outputs)
        self.inside += time.thread_time() - start
        return self._results(step)

    def measure(self, turns: int) -> float:
        """Host seconds for each of so many turns."""
        self.inside, start = 0.0, time.thread_time()
        for _ in range(turns):
            self.engine.step()
        return (time.thread_time() - start - self.inside) / turns


def measure_host(flags: Flags) -> Iterator[dict]:
    """Host time per decode step beside the step itself, and with long contexts."""
    import jax

    model = random_model(mini())
    engine = make_engine(
        model, max_num_seqs=32, max_model_len=1024, num_scheduler_steps=1, kda_slots=100
    )
    rng = random.Random(0)
    for _ in range(32):
        add(engine, [rng.randrange(8192) for _ in range(40)], 800)
    while any(sequence.num_uncomputed for sequence in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    for _ in range(20):
        engine.step()
    start = time.perf_counter()
    for _ in range(100):
        engine.step()
    wall = (time.perf_counter() - start) / 100
    clock = HostClock(engine)
    host = clock.measure(100)
    jax.block_until_ready(engine.runner.state)
    yield {
        "case": "host time of a decode step, batch 32, 20 M parameters",
        "host_ms": 1e3 * host,
        "step_ms": 1e3 * wall,
        "ratio": host / wall,
        "parameters": model.num_parameters,
    }
    times = {}
    for context in (1 << 10, (1 << 20) - 1024):
        times[context] = host_time_with_context(context)
    short, long = times.values()
    yield {
        "case": "host time of a decode step, batch 8, at 1 M tokens of context (ratio: to 1 K)",
        "host_ms": 1e3 * long,
        "at_1k_ms": 1e3 * short,
        "ratio": long / short,
    }


def idle_engine(model, **settings):
    """An engine on a device that answers at once and computes nothing: what is left is everything
    else, the making of inputs included."""
    from k3jax.engine import engine as engine_module

    class Idle(engine_module.Runner):
        def new_state(self):
            return None

        def _program(self, name, shape=None):
            def call(*arguments):
                if name in ("move", "wide"):
                    return None
                count = shape if name == "decode" else shape[0] + shape[2]
                tokens = np.full((count, 3), 5, np.int32)
                tokens[:, 1:] = 1
                if name == "decode":
                    return None, _Outputs(tokens.view(_OnHost))
                tokens[shape[0] :, 1] = arguments[3].samples
                return None, _Outputs(tokens.view(_OnHost)), None

            return call

    original = engine_module.Runner
    engine_module.Runner = Idle  # type: ignore[misc]
    try:
        return make_engine(model, num_scheduler_steps=1, enforce_eager=True, **settings)
    finally:
        engine_module.Runner = original  # type: ignore[misc]


class _OnHost(np.ndarray):
    def copy_to_host_async(self) -> None:
        pass


@dataclass
class _Outputs:
    tokens: np.ndarray


def host_time_with_context(context: int) -> float:
    """Host seconds of a decode step of 8 rows with so much context each."""
    engine = idle_engine(
        random_model(mini(4)),
        max_num_seqs=8,
        max_model_len=1 << 20,
        max_num_batched_tokens=8192,
        kv_pages=8 * (1 << 20) // 64 + 64,  # the same for any context
        kda_slots=64,
    )
    prompt = np.random.default_rng(0).integers(3, 8192, context).tolist()
    for row in range(8):
        add(engine, [row, *prompt[1:]], 1000)
    while engine.scheduler.waiting or any(s.num_uncomputed for s in engine.scheduler.running):
        engine.step()
    samples = []
    for _ in range(15):
        start = time.thread_time()
        for _ in range(50):
            engine.step()
        samples.append((time.thread_time() - start) / 50)
    return sorted(samples)[len(samples) // 2]


def measure_turns(flags: Flags) -> Iterator[dict]:
    """Time to first token of a chat of 4,096 tokens: cold, and its second turn."""
    engine = make_engine(random_model(mini()), max_num_seqs=4, max_model_len=8192)
    rng = random.Random(0)
    cold, warm = [], []
    for _ in range(3):
        prompt = [rng.randrange(8192) for _ in range(4096)]
        seconds, output = first_token(engine, prompt, 64)
        cold.append(seconds)
        again = [*prompt, *output.token_ids, *(rng.randrange(8192) for _ in range(32))]
        seconds, second = first_token(engine, again, 8)
        warm.append(seconds)
    yield {
        "case": "time to first token of a second turn, 4 K tokens",
        "cold_ms": 1e3 * sorted(cold)[1],
        "second_ms": 1e3 * sorted(warm)[1],
        "ratio": sorted(warm)[1] / sorted(cold)[1],
        "cached_tokens": second.num_cached_tokens,
    }


def first_token(engine, prompt: list[int], count: int):
    """(Seconds until its first token, the finished output)."""
    times: list[float] = []
    start = time.perf_counter()
    request = add(engine, prompt, count, lambda step: times.append(time.perf_counter() - start))
    drain(engine)
    return times[0], request.output


def measure_prefix(flags: Flags) -> Iterator[dict]:
    """50 users with one system prompt of 1,000 tokens and questions of their own, one at a time
    or eight at once: the share of prompt tokens that was not computed. Needs no arithmetic."""
    model = random_model(mini(4))
    policies: dict[str, dict] = {
        "no prefix caching": {"enable_prefix_caching": False},
        "prompt ends and junctions": {},
        "every 512 tokens": {"prefix_cache_retention_interval": "512"},
        "dense": {"prefix_cache_retention_interval": "dense"},
        "directed checkpoint": {},
    }
    for name, settings in policies.items():
        for users in (1, 8):
            rng = random.Random(0)
            system = [rng.randrange(512) for _ in range(1000)]
            engine = idle_engine(
                model, max_num_seqs=8, max_model_len=2048, kda_slots=1200, kv_pages=2000, **settings
            )
            requests = []
            for first in range(0, 50, users):
                for _ in range(min(users, 50 - first)):
                    question = [rng.randrange(512) for _ in range(rng.randrange(40, 120))]
                    options = {}
                    if name == "directed checkpoint":
                        options["cache_checkpoints"] = (len(system),)
                    requests.append(add(engine, system + question, 8, **options))
                drain(engine)
            cached = sum(request.output.num_cached_tokens or 0 for request in requests)
            total = sum(len(request.output.prompt_ids) for request in requests)
            yield {
                "case": f"hit rate, {name}, {users} at once",
                "hit_rate": cached / total,
                "possible": 49 * 960 / total,
                "stored_states": engine.cache.usage()["slots"].idle,
            }


def measure_soak(flags: Flags) -> Iterator[dict]:
    """Short requests with random aborts: everything comes back, memory stays flat."""
    from k3jax.engine.compile_cache import num_compilations

    model = random_model(mini(4, vocab_size=256))
    engine = make_engine(model, max_num_seqs=8, max_model_len=256, kda_slots=24, kv_pages=60)
    rng = random.Random(0)
    before = num_compilations()
    live: list = []
    ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    memory: list[int] = []

    def listen(step) -> None:
        if step.finish_reason is not None:
            ended[step.finish_reason] += 1

    for number in range(flags.requests):
        document = random.Random(rng.randrange(20))
        prompt = [document.randrange(256) for _ in range(rng.randrange(1, 100))]
        prompt += [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        live.append(add(engine, prompt, rng.randrange(1, 24), listen))
        live = [request for request in live if request.output.finish_reason is None]
        if live and rng.random() < 0.3:
            engine.abort(rng.choice(live))
        while engine.num_waiting > 4 or (engine.has_work and rng.random() < 0.5):
            engine.step()
        if number >= flags.requests // 5 and number % 100 == 0:
            memory.append(resident_bytes())
    drain(engine)
    usage = engine.cache.usage()
    yield {
        "case": f"{flags.requests} short requests with aborts",
        "finished": ended["length"] + ended["stop"],
        "aborted": ended["abort"],
        "errors": ended["error"],
        "held_pages": usage["pages"].referenced,
        "held_slots": usage["slots"].referenced,
        "compilations": num_compilations() - before,
        "memory_growth": (memory[-1] - memory[0]) / memory[0],
        "memory_spread": (max(memory) - min(memory)) / memory[0],
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# The slice of the real model, on a GPU.

HBM_BYTES_S = 4.8e12  # of an H200


def measure_slice(flags: Flags) -> Iterator[dict]:
    """Decode and prefill of K3's first four layers at full width, beside the memory floor."""
    import jax

    config = K3Config.preset("k3-slice-4l")
    model = random_model(config)
    jax.block_until_ready(model.split()[1])
    engine = make_engine(
        model,
        max_num_seqs=64,
        max_model_len=16384,
        max_num_batched_tokens=8192 + 128,
        num_scheduler_steps=32,
        enable_prefix_caching=False,
        enforce_eager=True,
        compile_profile="full",
    )
    rng = np.random.default_rng(0)
    for batch in (1, 8, 64):
        steps = decode_times(engine, rng, config.vocab_size, batch)
        floor = decode_bytes(config, batch) / HBM_BYTES_S
        yield {
            "case": f"decode, batch {batch}, 1 K context",
            "ms": 1e3 * steps["median_s"],
            "spread": f"{1e3 * steps['min_s']:.2f}-{1e3 * steps['max_s']:.2f}",
            "tok_s": batch / steps["median_s"],
            "floor_ms": 1e3 * floor,
            "of_floor": floor / steps["median_s"],
        }
    prompt = rng.integers(3, config.vocab_size, 8192).tolist()
    times = []
    for number in range(4):
        seconds, _ = first_token(engine, [number, *prompt[1:]], 1)
        times.append(seconds)
    median = sorted(times[1:])[1]
    floor = prefill_flops(config, 8192) / 989e12
    yield {
        "case": "prefill, 8,192 tokens",
        "ms": 1e3 * median,
        "spread": f"{1e3 * min(times[1:]):.1f}-{1e3 * max(times[1:]):.1f}",
        "tok_s": 8192 / median,
        "floor_ms": 1e3 * floor,
        "of_floor": floor / median,
    }


def decode_times(engine, rng, vocab_size: int, batch: int) -> dict[str, float]:
    """Seconds of a decode step, from loops of 32 steps on the device."""
    for _ in range(batch):
        add(engine, rng.integers(3, vocab_size, 1000).tolist(), 24 + 8 * 32)
    seconds, under_way = [], 0
    while engine.has_work:
        before = [sequence.num_expected for sequence in engine.scheduler.running]
        start = time.perf_counter()
        engine.step()  # waits for the loop that the turn before it began
        took = time.perf_counter() - start
        if under_way == 32:
            seconds.append(took / 32)
        after = [sequence.num_expected for sequence in engine.scheduler.running]
        under_way = after[0] - before[0] if len(after) == len(before) == batch else 0
    seconds = sorted(seconds)
    return {"median_s": seconds[len(seconds) // 2], "min_s": seconds[0], "max_s": seconds[-1]}


def decode_bytes(config: K3Config, batch: int, context: int = 1024) -> float:
    """Bytes that a decode step must move (architecture, section 11): each weight once, the experts
    that a batch chooses under uniform routing, KDA memory both ways, MLA rows."""
    dim, linear = config.hidden_size, config.linear_attn_config
    num_kda = config.layer_types.count("kda")
    num_mla = config.num_hidden_layers - num_kda
    num_moe = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    fixed = num_kda * 887.8e6 + num_mla * 464.4e6 + num_moe * 379.9e6
    fixed += (config.num_hidden_layers - num_moe) * 1.453e9 + config.vocab_size * dim * 2
    share = config.num_experts_per_token / config.num_experts
    distinct = config.num_experts * (1 - (1 - share) ** batch)
    inner = linear.num_heads * linear.head_dim
    state = 2 * (inner * linear.head_dim * 4 + 3 * 3 * inner * 2)
    return (
        fixed
        + num_moe * distinct * 17_547_264
        + batch * (num_kda * state + num_mla * context * 1152)
    )


def prefill_flops(config: K3Config, tokens: int) -> float:
    """Multiply-adds times two of a prefill without the head (architecture, section 11)."""
    num_kda = config.layer_types.count("kda")
    num_mla = config.num_hidden_layers - num_kda
    num_moe = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    per_token = num_kda * (0.887e9 + 18.1e6) + num_mla * 0.464e9 + num_moe * 1.437e9
    per_token += (config.num_hidden_layers - num_moe) * 1.453e9
    return tokens * per_token + num_mla * 61_440 * tokens * tokens / 2


if __name__ == "__main__":
    run_script(main)
