"""Where states are kept, and for how long they are protected."""

import pytest

from k3jax.cache import Pass
from k3jax.cache.retention import Kind, hit_limit, plan_retention, prompt_end
from tests.cache.driver import Engine, document, settings

UNIT, CHUNK = 4, 8  # so that scheduler_alignment is 8
LENGTHS = {  # prompt and new tokens; the last new one is never computed
    "shorter_than_a_unit": (3, 1),
    "one_unit": (4, 1),
    "one_unit_and_one": (5, 1),
    "one_alignment": (8, 1),
    "prompt_only": (63, 1),
    "prompt_at_a_boundary": (64, 1),
    "answer_ends_at_a_boundary": (30, 11),
    "answer_ends_behind_one": (30, 12),
    "long_answer": (10, 60),
    "answer_within_a_unit": (9, 2),
}
INTERVALS = {"dense": "dense", "zero": 0, "one_unit": UNIT, "seven_units": 7 * UNIT}


def expected_positions(interval, prompt, new):
    """The table of the serving page, section 2.9, by counting."""
    computed, alignment = prompt + new - 1, CHUNK
    kept = {(prompt - 1) // UNIT * UNIT}  # prompt-end
    if computed // UNIT * UNIT >= prompt:
        kept.add(computed // UNIT * UNIT)  # decode-end
    if interval == "dense":
        kept |= set(range(0, computed + 1, alignment))
    elif interval:
        for segment in range(computed // interval + 1):
            aligned = [
                p
                for p in range(segment * interval + 1, (segment + 1) * interval + 1)
                if p % alignment == 0
            ]
            kept |= set(aligned[-1:])
    return sorted(p for p in kept if 0 < p <= computed)


@pytest.mark.parametrize("exports", [0, 1, 2, 100])
@pytest.mark.parametrize("interval", INTERVALS.values(), ids=INTERVALS.keys())
@pytest.mark.parametrize(("prompt", "new"), LENGTHS.values(), ids=LENGTHS.keys())
def test_exact_positions(prompt, new, interval, exports):
    engine = Engine(
        settings(kda_chunk=CHUNK, retention_interval=interval, exports_per_segment=exports)
    )
    tokens = document(1, prompt)
    engine.serve(tokens, new)
    assert engine.stored(tokens + [0] * new) == expected_positions(interval, prompt, new)


@pytest.mark.parametrize("chunk", [8, 16, 24, 1 << 20])
def test_positions_do_not_depend_on_chunks(chunk):
    engine = Engine(settings(kda_chunk=CHUNK, retention_interval=28))
    tokens = document(1, 63)
    engine.serve(tokens, 1, chunk)
    assert engine.stored(tokens) == expected_positions(28, 63, 1)


def test_positions_do_not_depend_on_how_drafts_were_accepted():
    """C-17."""
    stored = set()
    for accepted in ([], [3, 3, 3, 3, 3, 3], [0, 2, 1, 3, 0, 0, 3, 1]):
        engine = Engine(settings(kda_chunk=CHUNK, retention_interval=8))
        client = engine.new(document(1, 10))
        engine.prefill(client)
        for count in accepted:
            # Drafts are 0, as what is sampled: then all of them may be accepted.
            engine.picks = [0, 0, 0, count, 0]
            engine.run(client, 4, Pass.VERIFY)
        while len(client.request.chain) < 60:
            engine.run(client, 1, Pass.DECODE)
        tokens = list(client.request.chain.tokens)[:34]
        stored.add(tuple(engine.stored(tokens)))
    assert stored == {(8, 16, 24, 32)}


def test_a_drafter_that_drops_the_last_unit_still_hits():
    """T10: the end of the prompt is kept one unit lower, and every aligned state."""
    sizes = settings(draft_drops_last_unit=True)
    assert hit_limit(sizes, 130) == 125 and prompt_end(sizes, 130) == 124
    assert prompt_end(sizes, 3) == 0
    for interval in (0, "dense"):
        engine = Engine(settings(draft_drops_last_unit=True, retention_interval=interval))
        assert [engine.serve(document(1, 130)) for _ in range(2)] == [0, 124]


def test_where_reasons_meet_the_first_names_it():
    plan = plan_retention(
        settings(retention_interval="dense"), 21, junction=12, directed=[20, 13, 2]
    )
    kinds = {c.position: c.kind for c in plan.between(0, 30)}
    assert kinds == {
        4: Kind.INTERVAL,
        8: Kind.INTERVAL,
        12: Kind.DIRECTED,
        16: Kind.INTERVAL,
        20: Kind.DIRECTED,
        24: Kind.INTERVAL,
        28: Kind.INTERVAL,
    }
    assert [c.position for c in plan.fixed] == [12, 20]


def test_second_hit():
    """Three requests share 1000 tokens: the second finds pages only and keeps a state there."""
    engine = Engine(settings(num_pages=2000, page_size=16, match_unit=16, kda_chunk=16))
    head = document(1, 1000)
    hits = [engine.serve(head + document(tail, 50)) for tail in (2, 3, 4)]
    assert hits == [0, 0, 992]
    assert engine.manager.stats.snapshots["junction"] == 1
    assert engine.manager.stats.attention_hit_tokens == 2 * 992


@pytest.mark.parametrize("chunk", [64, 192])
def test_the_junction_may_fall_into_any_chunk(chunk):
    engine = Engine(settings(num_pages=2000, page_size=16, match_unit=16, kda_chunk=16))
    head = document(1, 1000)
    assert [engine.serve(head + document(n, 50), chunk=chunk) for n in (2, 3, 4)] == [0, 0, 992]


def test_the_next_turn_resumes_near_the_end_of_the_answer():
    """decode-end, R-7."""
    engine = Engine(settings())
    first = document(1, 10)
    engine.serve(first, 20)
    replayed = first + [0] * 20
    assert engine.serve(replayed + document(2, 5)) == 28
    assert engine.manager.stats.snapshots["decode_end"] == 1


def test_without_decode_end():
    engine = Engine(settings(decode_end=False))
    first = document(1, 10)
    engine.serve(first, 20)
    assert engine.stored(first + [0] * 20) == [8]


def test_directed_checkpoints_are_rounded_down():
    engine = Engine(settings(kda_chunk=CHUNK))
    tokens = document(1, 50)
    engine.serve(tokens, checkpoints=(7, 21, 50))
    assert engine.stored(tokens) == [16, 48]  # 48 is the prompt's end, too


def test_a_pin_protects_until_its_time():
    engine = Engine(settings(num_pages=12, num_slots=6, max_pinned_fraction=0.5))
    tokens = document(1, 18)
    engine.serve(tokens, pin_ttl_s=10.0)
    assert str(engine.manager.explain("r1")).count("pinned") == 1
    assert engine.manager.pins.num_pages == 4 and engine.manager.pins.num_slots == 1
    for seed in range(2, 6):
        engine.serve(document(seed, 20))
    assert engine.stored(tokens) == [16]
    engine.now = 10.0
    for seed in range(6, 10):
        engine.serve(document(seed, 30))
    assert engine.stored(tokens) == [] and engine.manager.pins.num_pages == 0


def test_pins_are_prolonged_by_use_and_counted_once():
    engine = Engine(settings(max_pinned_fraction=0.5))
    tokens = document(1, 18)
    engine.serve(tokens, pin_ttl_s=10.0)
    engine.now = 8.0
    engine.serve(tokens, pin_ttl_s=10.0)
    engine.now = 12.0
    engine.serve(document(2, 5))
    assert engine.manager.pins.num_pages == 4
    engine.now = 18.0
    engine.serve(document(3, 5))
    assert engine.manager.pins.num_pages == 0


def test_pins_have_a_share_of_the_pool():
    engine = Engine(settings(num_pages=41, max_pinned_fraction=0.2))
    for seed in (1, 2, 3):
        engine.serve(document(seed, 18), pin_ttl_s=10.0)
    assert engine.manager.pins.num_pages == 8
    assert engine.manager.stats.pins_refused == 1
    assert "could not be pinned" in str(engine.manager.explain("r3"))


def test_priority_decides_who_is_evicted():
    engine = Engine(settings(num_pages=14, num_slots=4))
    engine.serve(document(1, 18), priority=1)
    engine.serve(document(2, 18))
    for seed in (3, 4, 5):
        engine.serve(document(seed, 18), priority=-1)
    assert engine.stored(document(1, 18)) == [16] and engine.stored(document(2, 18)) == [16]


def test_states_are_evicted_least_recently_used_first():
    engine = Engine(settings(num_slots=4))  # one runs, two are kept
    for seed in (1, 2):
        engine.serve(document(seed, 6))
    engine.serve(document(1, 6))
    engine.serve(document(3, 6))
    assert [engine.stored(document(seed, 6)) for seed in (1, 2, 3)] == [[4], [], [4]]
    assert engine.manager.explain("r1") is not None
    assert "removed (evicted)" in str(engine.manager.explain(engine.new(document(2, 6)).request))
