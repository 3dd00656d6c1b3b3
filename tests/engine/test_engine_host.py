"""The engine's host side on a device of hashes: every request gets its own tokens, always."""

import random
from dataclasses import dataclass, field

import pytest

from k3jax.cache.invariants import check_invariants
from k3jax.engine import engine as engine_module
from k3jax.engine.config import EngineConfig
from k3jax.engine.engine import Engine
from k3jax.engine.output import Output, TextReader
from k3jax.engine.request import RequestOptions, SamplingParams
from k3jax.errors import ConfigError, EngineError, RequestError
from tests.engine import fake_runner
from tests.engine.fake_runner import STOP, VOCAB, FakeRunner, oracle


@pytest.fixture
def make(monkeypatch):
    """Engines over a fake device."""
    monkeypatch.setattr(engine_module, "Runner", FakeRunner)

    def make_engine(**settings) -> Engine:
        defaults = {
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "block_size": 16,
            "kv_pages": 40,
            "kda_slots": 12,
        }
        return Engine(fake_runner.model(), EngineConfig(**(defaults | settings)))

    return make_engine


@dataclass
class Client:
    """A request, what it must get, and what it got."""

    prompt: list[int]
    max_tokens: int
    seed: int = 0
    options: RequestOptions = field(default_factory=RequestOptions)
    stops: frozenset[int] = frozenset({STOP})
    steps: list = field(default_factory=list)
    request: object = None

    def start(self, engine: Engine) -> "Client":
        params = SamplingParams(max_tokens=self.max_tokens, seed=self.seed)
        output = Output(self.prompt, params, self.stops, TextReader(None, params))
        self.request = engine.prepare(output, self.options)
        engine.add(self.request, self.steps.append)
        return self

    @property
    def output(self) -> Output:
        return self.request.output

    def check(self) -> None:
        expected = oracle(self.prompt, self.max_tokens, set(self.stops), self.seed)
        assert self.output.token_ids == expected
        assert self.output.finish_reason == ("stop" if expected[-1] in self.stops else "length")
        told = [token for step in self.steps for token in step.token_ids]
        assert told == expected
        assert [step.finish_reason for step in self.steps[:-1]] == [None] * (len(self.steps) - 1)


def run(engine: Engine, limit: int = 20_000) -> None:
    for _ in range(limit):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work, "S-5"
    check_empty(engine)


def check_empty(engine: Engine) -> None:
    engine.cache.release_pins()
    check_invariants(engine.cache)
    assert len(engine.scheduler._free_rows) == engine.limits.max_num_seqs
    for counts in engine.cache.usage().values():
        assert counts.referenced == 0


def options(rng: random.Random, engine: Engine, **fields) -> RequestOptions:
    """A salt, and a priority where there are any."""
    has_priorities = engine.config.scheduling_policy == "priority"
    return RequestOptions(
        priority=rng.randrange(3) if has_priorities else 0,
        cache_salt=rng.choice([None, None, "a"]),
        **fields,
    )


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """A stretch of one of a few documents, and an end of its own."""
    document = random.Random(rng.randrange(3))
    start = [document.randrange(2, VOCAB) for _ in range(rng.randrange(longest))]
    return start + [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 20))]


SETTINGS = {
    "default": {},
    "no_cache": {"enable_prefix_caching": False},
    "synchronous": {"async_scheduling": False},
    "one_token_steps": {"num_scheduler_steps": 1},
    "long_loops": {"num_scheduler_steps": 16},
    "small_pool": {"kv_pages": 34, "kda_slots": 5},
    "tiny_pages": {"block_size": 8, "kv_pages": 70, "prefix_match_unit": 16},
    "fine_units": {"prefix_match_unit": 4},
    "coarse_units": {"prefix_match_unit": 64},
    "dense": {"prefix_cache_retention_interval": "dense", "kda_slots": 30},
    "interval": {"prefix_cache_retention_interval": "192"},
    "priority": {"scheduling_policy": "priority", "kv_pages": 36},
    "one_row": {"max_num_seqs": 1},
    "full_profile": {"compile_profile": "full"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_request_gets_its_own_tokens(make, settings):
    rng = random.Random(str(settings))
    engine = make(**settings)
    clients: list[Client] = []
    aborted = []
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            client = Client(
                random_prompt(rng, 260),
                rng.randrange(1, 60),
                rng.randrange(3),
                options(rng, engine),
            )
            clients.append(client.start(engine))
        for _ in range(rng.randrange(8)):
            engine.step()
        if rng.random() < 0.4 and clients:
            client = rng.choice(clients[-3:])
            if client.output.finish_reason is None:
                engine.abort(client.request)
                engine.abort(client.request)  # S-3: nothing happens
                assert client.output.finish_reason == "abort"
                aborted.append(client)
        check_invariants(engine.cache)
    run(engine)
    assert len(aborted) > 3
    for client in clients:
        if client not in aborted:
            client.check()


def test_loops_and_preemptions_happen(make):
    """What the test above relies on."""
    engine = make(kv_pages=34, kda_slots=6, num_scheduler_steps=8)
    clients = [Client([7 + i] * 100, 60, stops=frozenset()).start(engine) for i in range(4)]
    run(engine)
    assert engine.scheduler.stats.preemptions > 0
    assert max(len(step.token_ids) for client in clients for step in client.steps) == 8
    for client in clients:
        client.check()


def test_preempted_requests_resume_from_the_cache(make):
    engine = make(kv_pages=34, kda_slots=12)
    clients = [Client([9 + i] * 120, 60, stops=frozenset()).start(engine) for i in range(4)]
    run(engine)
    assert engine.scheduler.stats.preemptions > 0
    # Each prompt token is computed once, but for what a preempted request lost.
    assert engine.scheduler.stats.prefill_tokens < 2 * 4 * 120
    for client in clients:
        client.check()
        assert client.output.num_cached_tokens == 0  # C-2: a preemption adds nothing


@pytest.mark.parametrize("place", ["dispatch", "results"])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 13])
def test_a_device_error_costs_nobody_his_tokens(make, monkeypatch, place, call):
    engine = make()
    clients = [Client([5 + i] * (30 + 40 * i), 30).start(engine) for i in range(5)]
    monkeypatch.setattr(FakeRunner, "fail", (call, place))
    run(engine)
    monkeypatch.setattr(FakeRunner, "fail", None)
    clients.append(Client([3] * 90, 10).start(engine))
    run(engine)
    for client in clients:
        client.check()
    assert engine.cache.epoch <= 1


def test_requests_that_break_the_device_end_alone(make, monkeypatch):
    engine = make()
    broken = Client([4] * 40, 20).start(engine)
    dispatch = FakeRunner.dispatch

    def fail(self, schedule):
        if any(row.sequence is broken.request.sequence for row in schedule.prefill):
            raise RuntimeError("this request breaks the device")
        return dispatch(self, schedule)

    monkeypatch.setattr(FakeRunner, "dispatch", fail)
    run(engine)
    assert broken.output.finish_reason == "error" and "device" in broken.output.error
    good = Client([5] * 40, 20).start(engine)
    run(engine)
    good.check()


def test_a_device_that_is_gone_ends_the_engine(make, monkeypatch):
    engine = make()
    for i in range(30):
        Client([4 + i % 8] * 40, 20).start(engine)

    def fail(self, schedule):
        raise RuntimeError("gone")

    monkeypatch.setattr(FakeRunner, "dispatch", fail)
    with pytest.raises(EngineError, match="fails at every step: gone"):
        run(engine)


def test_numbers_that_are_not_finite_end_one_request(make, monkeypatch):
    """F002, C-13: nothing of it is published, its neighbours do not notice."""
    monkeypatch.setattr(FakeRunner, "poison", 31)
    engine = make()
    good = [Client([5 + i] * 70, 20, stops=frozenset({31})).start(engine) for i in range(3)]
    bad = Client([5] * 70 + [31] + [6] * 10, 20).start(engine)
    run(engine)
    assert bad.output.finish_reason == "error" and "finite" in bad.output.error
    assert bad.output.token_ids == []
    for client in good:
        client.check()
    monkeypatch.setattr(FakeRunner, "poison", None)
    again = Client(bad.prompt, 20).start(engine)
    run(engine)
    again.check()
    assert again.output.num_cached_tokens <= 64


def test_second_turn_resumes_behind_the_answer(make):
    engine = make(block_size=16, kv_pages=80, kda_slots=20)
    first = Client([5] * 100, 60, stops=frozenset()).start(engine)
    run(engine)
    second = Client(first.prompt + first.output.token_ids + [9] * 20, 8).start(engine)
    run(engine)
    second.check()
    assert second.output.num_cached_tokens >= 144  # of 160: behind the prompt
    assert "144" in engine.explain(second.request) or "hit" in engine.explain(second.request)


def test_aborts_in_every_state_give_everything_back(make):
    engine = make(kda_slots=5, kv_pages=40)
    for turns in range(12):
        clients = [Client([3 + turns] * 150, 40).start(engine) for _ in range(6)]
        for _ in range(turns):
            engine.step()
        for client in clients:
            engine.abort(client.request)
            assert client.output.finish_reason in ("abort", "stop", "length")
            assert client.steps[-1].finish_reason == client.output.finish_reason
        run(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_new_weights_leave_no_trace_of_the_old(make, monkeypatch, steps):
    """F074: also for requests that run or wait when they come."""
    monkeypatch.setattr(engine_module, "new_weights", lambda old, new: new)
    engine = make(max_num_seqs=2)
    clients = [Client([5] * 130, 20, stops=frozenset()).start(engine) for _ in range(3)]
    for _ in range(steps):
        engine.step()
    before = [len(client.output.token_ids) for client in clients]
    engine.update_weights("other", "second")
    during = [len(client.output.token_ids) for client in clients]
    assert all(b <= d <= b + 8 for b, d in zip(before, during, strict=True))
    run(engine)
    for client, count in zip(clients, during, strict=True):
        client.check()
        assert client.output.weight_versions == [0] * count + ["second"] * (20 - count)
    roots = {root.root.weight_version for root in engine.cache.index.roots.values()}
    assert roots == {"second"}


def test_salts_isolate(make):
    """F025."""
    engine = make()
    prompt = [8] * 200
    found = []
    for salt in ("a", "b", "a", None, None):
        client = Client(prompt, 4, options=RequestOptions(cache_salt=salt)).start(engine)
        run(engine)
        found.append(client.output.num_cached_tokens > 0)
    assert found == [False, False, True, False, True]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_is_served_first(make, policy):
    engine = make(max_num_seqs=1, scheduling_policy=policy)
    order = []
    for name, priority in (("first", 5), ("second", 5), ("urgent", -1)):
        priority = priority if policy == "priority" else 0
        client = Client([6] * 20, 3, stops=frozenset(), options=RequestOptions(priority=priority))
        client.start(engine)
        client.request.listener = lambda step, name=name: (
            order.append(name) if step.finish_reason else None
        )
    run(engine)
    expected = {"fcfs": ["first", "second", "urgent"], "priority": ["urgent", "first", "second"]}
    assert order == expected[policy]


def test_nobody_waits_for_ever(make):
    """S-6: a request is overtaken at most so many times."""
    engine = make(max_num_seqs=1, scheduling_policy="priority")
    engine.scheduler.settings = type(engine.scheduler.settings)(
        **(vars(engine.scheduler.settings) | {"max_overtakes": 5})
    )
    patient = Client([6] * 20, 3, options=RequestOptions(priority=9)).start(engine)
    overtakers = []
    for _ in range(200):
        if patient.output.finish_reason is not None:
            break
        overtakers.append(Client([7] * 20, 2, options=RequestOptions(priority=0)).start(engine))
        for _ in range(4):
            engine.step()
    assert patient.output.finish_reason is not None
    done = sum(client.output.finish_reason is not None for client in overtakers)
    assert done <= 7


REFUSED = {
    "prompt": [
        ({"prompt": []}, {}),
        ({"prompt": [VOCAB]}, {}),
        ({"prompt": [-1]}, {}),
        ({"prompt": [2.0]}, {}),
        ({"prompt": [True]}, {}),
        ({"prompt": [5] * 512}, {}),
    ],
    "max_tokens": [({"max_tokens": 510}, {}), ({"max_tokens": 10**9}, {})],
    "cache_salt": [({}, {"cache_salt": ""}), ({}, {"cache_salt": 1})],
    "cache_checkpoints": [({}, {"cache_checkpoints": (99,)})],
    "cache_priority": [({}, {"cache_priority": 1000})],
    "cache_pin_ttl_s": [({}, {"cache_pin_ttl_s": float("nan")})],
    "stop_token_ids": [({"stop_token_ids": [VOCAB]}, {})],
    "logit_bias": [({"logit_bias": {VOCAB: 1.0}}, {})],
    "allowed_token_ids": [({"allowed_token_ids": [VOCAB]}, {})],
    "logprobs": [({"logprobs": 21}, {})],
    "prompt_logprobs": [({"prompt_logprobs": 21}, {})],
    "bad_words": [({"bad_words": ["x"]}, {})],
    "n": [({"n": 2}, {})],
}


@pytest.mark.parametrize(
    "field, fields, options", [(f, *case) for f, cases in REFUSED.items() for case in cases]
)
def test_bad_requests_are_refused_and_harm_nobody(make, field, fields, options):
    engine = make()
    neighbour = Client([5] * 100, 20).start(engine)
    engine.step()
    fields = {"prompt": [5] * 10} | fields
    prompt = fields.pop("prompt")
    with pytest.raises(RequestError) as refusal:
        params = SamplingParams(**fields)
        output = Output(prompt, params, frozenset(params.stop_token_ids), TextReader(None, params))
        engine.prepare(output, RequestOptions(**options))
    assert refusal.value.field == field
    run(engine)
    neighbour.check()


@pytest.mark.parametrize("bad", [((1,) * 9,), ((1, 2),) * 65, ((VOCAB,),)])
def test_bad_words_as_tokens_are_checked(make, bad):
    params = SamplingParams(bad_words=["x"])
    output = Output([5], params, frozenset(), TextReader(None, params), bad_word_ids=bad)
    with pytest.raises(RequestError) as refusal:
        make().prepare(output)
    assert refusal.value.field == "bad_words"


def test_a_context_that_can_never_fit(make):
    """S-4: it is refused at the start where it was asked for, and lowered where it was not."""
    with pytest.raises(ConfigError, match="--max-model-len 512 exceeds the 144 tokens"):
        make(kv_pages=10)
    engine = make(kv_pages=10, max_model_len=None)
    assert engine.max_model_len == 144
    with pytest.raises(RequestError, match="exceed the 144 tokens") as refusal:
        Client([5] * 100, 45).start(engine)
    assert refusal.value.field == "max_tokens"
    client = Client([5] * 100, 44, stops=frozenset()).start(engine)
    run(engine)
    client.check()


def test_priorities_need_their_policy(make):
    with pytest.raises(RequestError) as refusal:
        Client([5], 1, options=RequestOptions(priority=1)).start(make())
    assert refusal.value.field == "priority"


def test_a_reader_that_fails_ends_its_request_alone(make):
    engine = make()
    broken, good = Client([5] * 30, 20), Client([6] * 30, 20)
    for client in (broken, good):
        client.start(engine)

    def feed(token_ids):
        raise ZeroDivisionError

    broken.output.reader.feed = feed
    run(engine)
    assert broken.output.finish_reason == "error" and "read" in broken.output.error
    good.check()


def test_exact_fit(make):
    """F083: a request may end with the last token that there is room for."""
    engine = make(kv_pages=33, max_model_len=512)
    client = Client([5] * 412, 100, stops=frozenset()).start(engine)
    run(engine)
    client.check()


@pytest.mark.slow
def test_many_random_traces(make):
    rng = random.Random(5)
    for number in range(2_000):
        choices = {
            "block_size": rng.choice([8, 16, 32]),
            "prefix_match_unit": rng.choice([None, 8, 16, 32, 64]),
            "num_scheduler_steps": rng.choice([1, 2, 8]),
            "async_scheduling": rng.random() < 0.7,
            "max_num_seqs": rng.choice([1, 2, 4]),
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
            "enable_prefix_caching": rng.random() < 0.8,
            "prefix_cache_retention_interval": rng.choice([None, "dense", "128"]),
            "compile_profile": rng.choice(["tiny", "full"]),
            "max_model_len": 256,
            "kda_slots": rng.randrange(6, 14),
        }
        engine = make(**choices, kv_pages=256 // choices["block_size"] + rng.randrange(2, 30))
        clients = []
        for _ in range(rng.randrange(2, 10)):
            client = Client(
                random_prompt(rng, 150),
                rng.randrange(1, 50),
                rng.randrange(2),
                options(
                    rng,
                    engine,
                    cache_pin_ttl_s=rng.choice([None, None, 5.0]),
                    cache_priority=rng.randrange(-1, 2),
                ),
            )
            clients.append(client.start(engine))
            for _ in range(rng.randrange(10)):
                engine.step()
            if rng.random() < 0.2:
                engine.abort(rng.choice(clients).request)
        run(engine)
        for client in clients:
            assert client.output.finish_reason is not None, number
            if client.output.finish_reason != "abort":
                client.check()
