"""Stories about the cache manager, each about one way to be wrong. Every read of every row in them
is compared with the tokens of its request (see the simulation)."""

import random
import statistics
import time

import pytest

from k3jax.cache import (
    Admission,
    CacheRequest,
    Defer,
    HashChain,
    ImageSpan,
    Miss,
    NoSpace,
    Pass,
    Root,
    RowPlan,
    RowResult,
)
from k3jax.cache.manager import CacheManager
from k3jax.cache.sequence import Fence
from k3jax.cache.simulation import GARBAGE, NOT_FINITE, ZERO, Client
from k3jax.errors import RequestError
from tests.cache.driver import ROOT, Engine, document, settings

# Lookup.


def test_hits_follow_the_match_unit():
    """F014: prompts of exactly N and 2N tokens are found again, short of their last token."""
    for length in (16, 32):
        engine = Engine(settings(page_size=16, match_unit=4, kda_chunk=4, decode_end=False))
        tokens = document(1, length)
        assert engine.serve(tokens) == 0
        assert engine.serve([*tokens, 5]) == length - 4  # N-1, rounded down to the unit
        assert engine.serve(tokens) == length - 4


def test_a_shared_system_prompt_of_any_length_hits():
    """F015: twenty questions behind 200 tokens; pages are larger than the unit."""
    engine = Engine(settings(page_size=64, match_unit=16, kda_chunk=64))
    hits = [engine.serve(document(0, 200) + document(n + 1, 9)) for n in range(20)]
    assert hits == [0, 0] + 18 * [192]
    assert engine.manager.stats.hit_tokens == 18 * 192


@pytest.mark.parametrize("shared", [64, 80, 128, 144])
def test_three_sizes_that_differ(shared):
    """F018: page 8, unit 16, chunk 64; resumed on and off the chunk."""
    engine = Engine(settings(page_size=8, match_unit=16, kda_chunk=64, num_pages=400))
    head = document(0, shared)
    prompts = [head + document(n + 1, 200 - shared) for n in range(3)]
    assert [engine.serve(prompt) for prompt in prompts] == [0, 0, shared]
    for prompt in prompts:
        assert engine.serve(prompt) == 192


def test_a_hit_of_pages_alone_is_reported_and_not_used():
    """C-1, T4."""
    engine = Engine(settings(decode_end=False))
    engine.serve(document(1, 22))
    hit = engine.hit(document(1, 19) + document(2, 4))
    assert (hit.num_tokens, hit.attention_tokens, hit.junction) == (0, 16, 16)
    assert hit.reason is Miss.NO_STATE


def test_cached_tokens_are_those_of_the_first_schedule():
    """C-2."""
    engine = Engine(settings())
    engine.serve(document(1, 21))
    client = engine.new(document(1, 21) + document(2, 20))
    engine.run(client, 20)
    assert client.request.num_cached_tokens == 20
    engine.preempt(client)
    assert engine.prefill(client) == 40
    assert client.request.num_cached_tokens == 20
    assert engine.manager.stats.queries == 2
    assert "admitted 2 times" in str(engine.manager.explain(client.request))


def test_one_token_is_always_computed():
    """T43."""
    engine = Engine(settings())
    assert [engine.serve(document(1, 8)) for _ in range(2)] == [0, 4]
    assert [engine.serve([7]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "other",
    [
        Root("model", cache_salt="a"),
        Root("model", adapter=("lora", 1)),
        Root("model", weight_version=2),
        Root("model", state_dtype="bfloat16"),
    ],
    ids=["salt", "adapter", "weights", "dtype"],
)
def test_roots_never_hit_each_other(other):
    """F025, T45."""
    engine = Engine(settings())
    tokens = document(1, 20)
    hits = [engine.serve(tokens, root=root) for root in (ROOT, other, ROOT, other)]
    assert hits == [0, 0, 16, 16]
    assert engine.manager.stats.misses[Miss.ROOT] == 2


def test_another_picture_under_the_same_text():
    """F019: blue does not reuse red's pages from the picture on; red is found again."""
    engine = Engine(settings())
    tokens = document(1, 6) + [9] * 8 + document(2, 8)
    red, blue = ([ImageSpan(name, 6, 8)] for name in (b"red", b"blue"))
    assert engine.serve(tokens, images=red) == 0
    hit = engine.hit(tokens, images=blue)
    assert hit.attention_tokens == 4
    assert engine.serve(tokens, images=blue) == 0
    assert engine.serve(tokens, images=red) == 20


def test_what_is_not_read():
    engine = Engine(settings())
    engine.serve(document(1, 20))
    assert engine.serve(document(1, 20), read_cache=False) == 0
    assert engine.manager.stats.misses[Miss.NOT_READ] == 1
    off = Engine(settings(enable_prefix_caching=False))
    assert [off.serve(document(1, 20)) for _ in range(2)] == [0, 0]
    assert off.stored(document(1, 20)) == [] and not off.manager.index.nodes


# Copy on write.


def test_the_last_page_of_a_hit_is_copied():
    """C-5: the original stays, the rest of the copy is zero."""
    engine = Engine(settings(page_size=8, match_unit=2, kda_chunk=2))
    engine.serve(document(1, 14))  # a state at 12, inside the second page
    client = engine.new(document(1, 13) + document(2, 5))
    engine.manager.begin_step()
    admission = engine.admit(client)
    assert admission.num_cached_tokens == 12
    (copy,) = engine.dispatch().page_copies
    assert copy.num_tokens == 4 and copy.target == admission.pages[1] != copy.source
    assert engine.cells[copy.target][:4] == engine.cells[copy.source][:4]
    assert engine.cells[copy.target][4:] == [ZERO] * 4
    engine.settle()
    engine.prefill(client)
    engine.finish(client)
    assert engine.serve(document(1, 14)) == 12  # nothing was written into the original


def test_a_b_a():
    """F016, C-3: another prefix in between, with evictions by a small pool."""
    for pages in (9, 16, 60):
        engine = Engine(settings(num_pages=pages, num_slots=4, page_size=8, match_unit=4))
        a, b = document(0, 40), document(0, 20) + document(1, 30)
        for prompt in (a, b, a, b, b, a):
            engine.serve(prompt, new=3)


def test_branches_inside_a_page_survive_its_eviction():
    engine = Engine(settings(page_size=8, match_unit=2, kda_chunk=2))
    engine.serve(document(1, 8), new=1)
    engine.serve(document(1, 5) + document(2, 12), new=1)  # resumes at 4, copies, goes on
    engine.serve(document(1, 5) + document(2, 12), new=1)
    index = engine.manager.index
    chain = HashChain(ROOT, 2, document(1, 4))
    first = index.at(chain, 4)
    assert engine.manager.pages.oldest() in first.pages
    index.evict_page()
    engine.check()
    assert first.alive and index.at(chain, 2).pages == first.pages
    assert engine.serve(document(1, 5) + document(2, 12)) == 16


def test_forks_share_pages_and_copy_the_rest():
    engine = Engine(settings(page_size=4, match_unit=8))
    parent = engine.new(document(1, 10))
    engine.prefill(parent)
    chain = parent.request.chain.copy()
    child = CacheRequest("child", chain, 10)
    engine.manager.begin_step()
    used = engine.manager.usage()["pages"].referenced
    admission = engine.manager.fork("r1", child)
    assert isinstance(admission, Admission) and admission.pages[:2] == tuple(parent.table[:2])
    assert engine.manager.usage()["pages"].referenced == used + 1
    twin = Client(child, 60)
    engine.clients["child"] = twin
    engine._start(twin, admission)
    engine.extend(parent, 1, Pass.DECODE)
    engine.extend(twin, 1, Pass.DECODE)
    engine.dispatch()
    engine.settle()
    for client in (parent, twin):
        for _ in range(8):
            engine.run(client, 1, Pass.DECODE)
        engine.finish(client)


def test_a_fork_has_the_tokens_of_its_parent():
    engine = Engine(settings())
    parent = engine.new(document(1, 10))
    engine.prefill(parent)
    engine.manager.begin_step()
    for tokens in (document(2, 10), document(1, 9) + [1008]):
        child = CacheRequest("child", HashChain(ROOT, 4, tokens), 10)
        with pytest.raises(ValueError, match="tokens of its parent"):
            engine.manager.fork("r1", child)


# The commit fence.


def test_a_state_is_seen_only_after_it_was_written_and_came_back():
    """C-8, T1, T2."""
    engine = Engine(settings(), depth=1)
    tokens = document(1, 20)
    first = engine.new(tokens)
    engine.manager.begin_step()
    engine.admit(first)
    engine.extend(first, 20)
    seen = [engine.hit(tokens).num_tokens]
    engine.dispatch()
    engine.manager.begin_step()
    seen.append(engine.hit(tokens).num_tokens)
    engine.dispatch()
    engine.settle()
    assert seen == [0, 0] and engine.hit(tokens).num_tokens == 16


def test_a_request_aborted_before_its_step_leaves_nothing():
    """T1, T27."""
    engine = Engine(settings())
    client = engine.new(document(1, 20))
    engine.manager.begin_step()
    engine.admit(client)
    engine.extend(client, 20)
    engine.abort(client)
    plan = engine.dispatch()
    assert plan.empty and not engine.manager.index.nodes
    usage = engine.manager.usage()
    assert usage["pages"].free == 199 and usage["slots"].free == 39
    assert engine.serve(document(1, 20)) == 0


def test_what_was_dispatched_before_an_abort_is_published():
    """C-8: its tokens are known; the instant retry hits (T27)."""
    engine = Engine(settings(), depth=1)
    client = engine.new(document(1, 20))
    engine.manager.begin_step()
    engine.admit(client)
    engine.extend(client, 20)
    engine.dispatch()
    engine.abort(client)
    engine.manager.begin_step()
    retry = engine.new(document(1, 20), name="r1")
    answer = engine.manager.reserve(retry.request, wait=False)
    assert isinstance(answer, Admission) and answer.num_cached_tokens == 0
    engine._start(retry, answer)
    engine.dispatch()
    engine.settle()
    assert engine.stored(document(1, 20)) == [16]
    engine.settle()
    assert engine.prefill(retry) == 0
    engine.finish(retry)
    engine.drain()


def test_a_failed_step_leaves_nothing():
    """C-8: nor do the steps after it; the requests are admitted again."""
    engine = Engine(settings(), depth=1)
    engine.serve(document(3, 9))
    free = engine.manager.usage()
    clients = [engine.new(document(n, 20)) for n in (1, 2)]
    for client in clients:
        engine.manager.begin_step()
        engine.admit(client)
        engine.extend(client, 20)
        engine.dispatch()
    first = min(engine.results)
    assert engine.manager.fail(first) == ["r2", "r3"]
    engine.results.clear()
    assert engine.manager.usage() == free
    assert engine.stored(document(1, 20)) == []
    for client in clients:
        client.running = False
        assert engine.prefill(client) == 0


def test_a_request_does_not_read_what_the_same_step_writes():
    """C-9, T9: it waits where that is worth it, else it goes on with the shorter hit."""
    engine = Engine(settings(min_gain=16))
    for length, waits in ((17, True), (16, False)):
        tokens = document(length, length)
        first, second = engine.new(tokens), engine.new(tokens)
        engine.manager.begin_step()
        engine.admit(first)
        engine.extend(first, length)
        answer = engine.manager.reserve(second.request)
        assert isinstance(answer, Defer) == waits
        if isinstance(answer, Admission):
            engine._start(second, answer)
        engine.dispatch()
        engine.settle()
        assert engine.prefill(second) == (16 if waits else 0)
        for client in (first, second):
            engine.finish(client)
    assert engine.manager.stats.deferrals == 1


def test_waiting_may_be_refused():
    engine = Engine(settings(min_gain=4))
    first, second = (engine.new(document(1, 20)) for _ in range(2))
    engine.manager.begin_step()
    engine.admit(first)
    engine.extend(first, 20)
    assert engine.admit(second, wait=False).num_cached_tokens == 0


def test_a_late_stop_publishes_nothing_behind_the_stop():
    """C-10, C-12: the token computed past the stop, and the state that has it, are not kept."""
    engine = Engine(settings(), depth=1)
    client = engine.new(document(1, 6))
    engine.prefill(client)  # 6 computed, the 7th sampled
    for _ in range(2):
        engine.manager.begin_step()
        engine.extend(client, 1, Pass.DECODE)
        engine.dispatch()
    # The host finds that the 7th token was a stop: what follows it is overrun.
    names = [result.client.request.request_id for result in engine.results[min(engine.results)]]
    engine.manager.commit(min(engine.results), {name: RowResult(1) for name in names})
    engine.results.pop(min(engine.results))
    engine.finish(client)
    assert list(client.request.chain.tokens) == [*document(1, 6), 0]
    engine.settle()  # the overrun row, which stands at 8 tokens now
    assert engine.stored([*document(1, 6), 0, 0]) == [4]
    assert len(engine.manager.index.nodes) == 1


def test_a_loop_that_ran_past_a_stop_string():
    """C-12: the device computed more tokens than are final, up to a boundary."""
    engine = Engine(settings())
    client = engine.new(document(1, 6))
    engine.prefill(client)
    engine.manager.begin_step()
    engine.picks = [5] + 6 * [0]
    engine.extend(client, 6, Pass.DECODE)
    engine.dispatch()
    (result,) = engine.results.pop(min(engine.results))
    assert result.num_computed == 6
    client.request.chain.extend(result.sampled[:1])  # 8 tokens are final, 12 computed
    engine.manager.commit(next(iter(engine.manager.steps())).step_id, {"r1": RowResult(6)})
    engine.finish(client)
    engine.check()
    assert engine.stored(document(1, 6) + [0] * 8) == [4]
    assert len(engine.manager.index.nodes) == 2


def test_the_state_aside_that_a_late_stop_finds_under_way_is_kept():
    """decode-end with a step ahead: the copy at 8 is in the step that overruns."""
    engine = Engine(settings(), depth=1)
    client = engine.new(document(1, 7))
    engine.prefill(client)
    for _ in range(2):
        engine.manager.begin_step()
        engine.extend(client, 1, Pass.DECODE)
        plan = engine.dispatch()
    assert [copy.position for copy in plan.slot_copies] == [8]
    first = min(engine.results)
    engine.manager.commit(first, {"r1": RowResult(1)})
    engine.results.pop(first)
    engine.finish(client)
    assert engine.stored([*document(1, 7), 0]) == [4]
    engine.settle()
    assert engine.stored([*document(1, 7), 0]) == [4, 8]


def test_rejected_drafts_leave_no_trace():
    """C-10, C-18, T12: tokens, pages and states as without drafts."""
    nodes = []
    for verify in (False, True):
        engine = Engine(settings())
        client = engine.new(document(1, 6))
        engine.prefill(client)
        for _ in range(20):
            # Drafts are 1, sampled is 0: all drafts are rejected.
            engine.picks = [1, 1, 1, 0, 0] if verify else []
            engine.run(client, 4 if verify else 1, Pass.VERIFY if verify else Pass.DECODE)
        tokens = list(client.request.chain.tokens)
        engine.finish(client)
        nodes.append((tokens, set(engine.manager.index.nodes)))
    assert nodes[0] == nodes[1]


def test_a_state_at_a_chunk_boundary_is_that_state():
    """T3: 130 prompt tokens, chunk 64: the state at 128."""
    engine = Engine(settings(page_size=64, match_unit=64, kda_chunk=64))
    client = engine.new(document(1, 130))
    plan = engine.run(client, 130)
    assert [export.position for export in plan.rows[0].exports] == [128]
    assert engine.serve(document(1, 130)) == 128


def test_no_state_without_a_writer():
    """C-14: what the pass cannot export is given up, or the chunk is made to end there."""
    engine = Engine(settings(page_size=8, match_unit=4, kda_chunk=8))
    client = engine.new(document(1, 15))  # the prompt's end is at 12, off the chunk
    engine.run(client, 15)
    engine.finish(client)
    assert engine.stored(document(1, 15)) == []
    assert engine.manager.stats.skipped_snapshots["the pass could not write a state there"] == 1
    engine.serve(document(1, 15))
    assert engine.stored(document(1, 15)) == [12]


# Quarantine.


def test_a_row_that_is_not_finite_publishes_nothing():
    """C-13."""
    engine = Engine(settings())
    client = engine.new(document(1, 20))
    engine.run(client, 8)
    engine.manager.begin_step()
    engine.extend(client, 12)
    engine.dispatch()
    pages = list(client.table)
    slot = engine.manager._sequences["r1"].slot
    assert engine.settle(not_finite=["r1"]) == ["r1"]
    assert not engine.manager.index.nodes
    assert engine.manager.usage()["pages"].referenced == 0
    engine.manager.begin_step()
    plan = engine.dispatch()
    assert sorted(plan.zero_pages) == sorted(pages) and slot in plan.zero_slots
    assert engine.manager.stats.nonfinite_rows == 1


def test_zeroing_is_not_lost_with_a_step():
    engine = Engine(settings())
    client = engine.new(document(1, 8))
    engine.manager.begin_step()
    engine.admit(client)
    engine.extend(client, 8)
    engine.dispatch()
    engine.settle(not_finite=["r1"])
    engine.manager.begin_step()
    plan = engine.manager.end_step()
    assert plan.zero_pages and not plan.empty
    engine.manager.fail(plan.step_id)
    engine.manager.begin_step()
    again = engine.dispatch()
    assert sorted(again.zero_pages) == sorted(plan.zero_pages)
    assert sorted(again.zero_slots) == sorted(plan.zero_slots)


def test_what_a_bad_row_resumed_from_is_suspect():
    """C-13, T28: a stored state went bad; the first that reads it takes it out, and others that
    resumed from it publish nothing."""
    engine = Engine(settings())
    engine.serve(document(1, 21))
    chain = HashChain(ROOT, 4, document(1, 21))
    engine.states[engine.manager.index.at(chain, 20).slot].value = NOT_FINITE
    first, second = (engine.new(document(1, 21) + document(n, 9)) for n in (2, 3))
    engine.manager.begin_step()
    for client in (first, second):
        assert engine.admit(client).num_cached_tokens == 20
        engine.extend(client, 10)
        client.ill = True  # the device knows
    engine.dispatch()
    engine.settle(not_finite=[first.request.request_id])
    assert engine.stored(document(1, 21)) == [] and not engine.manager.index.nodes
    engine.run(second, 1, Pass.DECODE)
    engine.finish(second)
    assert not engine.manager.index.nodes
    assert engine.serve(document(1, 21)) == 0
    assert engine.serve(document(1, 21)) == 20


def test_a_copied_page_is_suspect_as_well():
    """C-13: the hit ended inside a page, of which the request holds a copy only."""
    engine = Engine(settings(page_size=8, match_unit=2, kda_chunk=2))
    engine.serve(document(1, 7))
    client = engine.new(document(1, 7) + document(2, 5))
    engine.manager.begin_step()
    assert engine.admit(client).num_cached_tokens == 6
    engine.extend(client, 6)
    engine.dispatch()
    engine.settle(not_finite=[client.request.request_id])
    assert not engine.manager.index.nodes and engine.serve(document(1, 7)) == 0


def test_a_row_that_went_bad_later_harms_only_itself():
    """C-13: what it read was proven by its first finite step."""
    engine = Engine(settings())
    engine.serve(document(1, 21))
    client = engine.new(document(1, 21) + document(2, 9))
    engine.run(client, 8)
    engine.manager.begin_step()
    engine.extend(client, 2)
    engine.dispatch()
    engine.settle(not_finite=[client.request.request_id])
    assert engine.serve(document(1, 21)) == 20
    assert engine.hit(document(1, 21) + document(2, 9)).attention_tokens == 20


# Room.


def test_fresh_running_slots_are_zeroed():
    """C-4."""
    engine = Engine(settings(num_slots=3))
    for seed in range(1, 5):
        client = engine.new(document(seed, 9))
        plan = engine.run(client, 9)
        assert plan.zero_slots == [plan.rows[0].slot]
        engine.finish(client)


def test_a_refusal_changes_nothing():
    """F023."""
    engine = Engine(settings(num_pages=6, num_slots=3))
    running = engine.new(document(1, 12))
    engine.run(running, 12)
    before = engine.manager.usage()
    waiting = engine.new(document(2, 12))
    engine.manager.begin_step()
    answer = engine.manager.reserve(waiting.request, num_tokens=12)
    assert answer == NoSpace(pages=1)
    assert engine.manager.usage() == before and waiting.request.num_cached_tokens is None
    engine.admit(waiting, num_tokens=8)
    assert engine.manager.extend(waiting.request.request_id, 12) == NoSpace(pages=1)
    engine.extend(waiting, 8)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least one token"):
            engine.manager.extend("r1", wrong)


def test_states_kept_aside_make_way():
    """S-4: a running request needs one slot, not two."""
    engine = Engine(settings(num_slots=3))
    first = engine.new(document(1, 8))
    engine.prefill(first)
    engine.run(first, 1, Pass.DECODE)  # keeps the state at 8 aside
    assert engine.manager._sequences["r1"].tail.fence is Fence.VERIFIED
    second = engine.new(document(2, 8))
    engine.run(second, 8)
    assert engine.manager._sequences["r1"].tail is None
    third = engine.new(document(3, 8))
    engine.manager.begin_step()
    assert engine.manager.reserve(third.request) == NoSpace(slots=1)


def test_a_lone_request_starts_whatever_is_stored():
    """S-4, S-5, T18: the hit itself must not take the room that the request needs."""
    engine = Engine(settings(num_pages=3, num_slots=3, page_size=8, match_unit=4))
    engine.serve(document(1, 7))
    assert engine.stored(document(1, 7)) == [4]
    longer = document(1, 7) + document(2, 8)
    engine.manager.check_fits(15, 1)
    assert engine.hit(longer).num_tokens == 4
    client = engine.new(longer)
    engine.manager.begin_step()
    assert engine.admit(client, num_tokens=11).num_cached_tokens == 0
    engine.extend(client, 11)
    assert Miss.NO_ROOM.value in str(engine.manager.explain(client.request))
    pinned = Engine(settings(num_pages=5, num_slots=3, max_pinned_fraction=1.0))
    pinned.serve(document(1, 10), pin_ttl_s=1e9)
    assert pinned.manager.pins.num_pages == 2
    other = pinned.new(document(2, 16))
    pinned.manager.begin_step()
    pinned.admit(other, num_tokens=16)
    pinned.extend(other, 16)
    assert pinned.manager.pins.num_pages == 0


def test_what_can_never_fit_is_refused():
    """S-4."""
    manager = Engine(settings(num_pages=5)).manager
    manager.check_fits(10, 6)
    for prompt, new, field in ((10, 7, "max_tokens"), (16, 1, "prompt")):
        with pytest.raises(RequestError) as error:
            manager.check_fits(prompt, new)
        assert error.value.field == field


def test_pages_go_before_what_still_leads_to_a_state():
    """C-15: pages behind the deepest state are of no use to resume, and go before older ones."""
    engine = Engine(settings(num_pages=9, num_slots=8))
    engine.serve(document(3, 9))
    engine.serve(document(1, 13), checkpoints=(4,))
    index = engine.manager.index
    index.drop_state(index.at(HashChain(ROOT, 4, document(1, 13)), 12), "test")
    engine.serve(document(2, 18))  # takes the three free pages, and two more
    assert engine.stored(document(3, 9)) == [8] and engine.stored(document(1, 13)) == [4]
    assert engine.hit(document(1, 13)).attention_tokens == 4


def test_a_lost_page_takes_the_states_behind_it():
    """C-15."""
    engine = Engine(settings(retention_interval="dense"))
    engine.serve(document(1, 21))
    assert engine.stored(document(1, 21)) == [4, 8, 12, 16, 20]
    node = engine.manager.index.at(HashChain(ROOT, 4, document(1, 21)), 12)
    engine.manager.index.drop(node, "test")
    engine.check()
    assert engine.stored(document(1, 21)) == [4, 8]
    assert engine.manager.usage()["slots"].idle == 2


def test_the_head_of_a_finished_request_survives_longest():
    engine = Engine(settings(num_pages=12, retention_interval="dense"))
    engine.serve(document(1, 21))
    engine.manager.evict(num_pages=9)
    assert engine.stored(document(1, 21)) == [4, 8]
    engine.check()


def test_shared_heads_stay_as_long_as_what_needs_them():
    """C-15: two requests computed one head; the second went on behind the first one's pages."""
    engine = Engine(settings())
    first, second = (engine.new(document(1, 9)) for _ in range(2))
    engine.manager.begin_step()
    for client in (first, second):
        engine.admit(client, wait=False)
        engine.extend(client, 9)
    engine.dispatch()
    engine.settle()
    engine.finish(first)
    for _ in range(12):
        engine.run(second, 1, Pass.DECODE)
    tokens = list(second.request.chain.tokens)
    engine.finish(second)
    assert engine.hit(tokens).attention_tokens == 20
    engine.manager.evict(num_pages=engine.manager.usage()["pages"].free + 1)
    assert engine.hit(tokens).attention_tokens == 16


def test_preemption_resumes_where_it_was():
    """S-7, T18 (#52520): a prompt preempted at an aligned chunk loses nothing."""
    engine = Engine(settings())
    client = engine.new(document(1, 40))
    engine.run(client, 24)
    engine.preempt(client)
    assert engine.hit(document(1, 40)).num_tokens == 24
    assert engine.prefill(client) == 24
    for _ in range(6):
        engine.run(client, 1, Pass.DECODE)
    engine.preempt(client)
    assert engine.prefill(client) == 44  # the state aside


def test_abort_in_every_state():
    """F021: 200 short requests with random aborts, 4 slots; then everything is back."""
    chance = random.Random(0)
    engine = Engine(settings(num_pages=20, num_slots=5), depth=1)
    for _ in range(200):
        engine.new(document(chance.randrange(4), 4 + chance.randrange(12)))
        engine.picks = [chance.randrange(64) for _ in range(200)]
        engine.step()
        engine.check()
    engine.picks = []
    engine.drain()
    engine.manager.evict(20, 5)
    usage = engine.manager.usage()
    assert usage["pages"].free == 19 and usage["slots"].free == 4


def test_aborting_twice_is_once():
    """S-3."""
    engine = Engine(settings())
    client = engine.new(document(1, 9))
    engine.prefill(client)
    manager = engine.manager
    assert manager.abort("r1") and not manager.abort("r1")
    for call in (manager.finish, manager.preempt, manager.page_table):
        with pytest.raises(KeyError):
            call("r1")


# Forgetting.


def test_new_weights_make_the_old_prefixes_unknown():
    """R-2: by the root; what runs on goes on, and publishes nothing any more."""
    engine = Engine(settings())
    engine.serve(document(1, 20))
    client = engine.new(document(1, 20) + document(2, 9))
    engine.run(client, 4)
    engine.manager.reset(root=ROOT.digest)
    assert not engine.manager.index.nodes
    engine.prefill(client)
    engine.finish(client)
    assert not engine.manager.index.nodes and engine.hit(document(1, 20)).num_tokens == 0
    assert engine.serve(document(1, 20), root=Root("model", 1)) == 0


def test_a_salt_can_be_forgotten():
    engine = Engine(settings())
    salted = Root("model", cache_salt="a")
    for root in (ROOT, salted):
        engine.serve(document(1, 21), root=root)
    engine.manager.reset(salt="a")
    assert engine.stored(document(1, 21)) == [20]
    assert engine.stored(document(1, 21), salted) == []
    engine.manager.reset()
    assert engine.manager.usage()["pages"].idle == 0 and not engine.manager.index.roots


def test_a_lost_device_is_forgotten():
    """O-3."""
    engine = Engine(settings(), depth=1)
    engine.serve(document(1, 20))
    client = engine.new(document(1, 20) + [1])
    hit = engine.manager.lookup(client.request)
    other = engine.new(document(2, 9))
    engine.manager.begin_step()
    engine.admit(other)
    engine.extend(other, 9)
    engine.dispatch()
    engine.restart()
    assert engine.manager.epoch == 1 and not other.running
    engine.manager.begin_step()
    assert engine.admit(client, hit=hit).num_cached_tokens == 0  # the old hit is void
    assert all(cell == GARBAGE for cells in engine.cells for cell in cells)


# Telling.


def test_explanations():
    engine = Engine(settings(num_slots=4))
    engine.serve(document(1, 22))
    texts = {}
    for name, tokens in {
        "unseen": document(2, 9),
        "whole": document(1, 22),
        "parted": document(1, 10) + document(2, 9),
        "short": [1, 2],
    }.items():
        texts[name] = str(engine.manager.explain(engine.new(tokens, name=name).request))
    assert "0 of 9 tokens" in texts["unseen"] and Miss.UNSEEN.value in texts["unseen"]
    assert "20 of 22" in texts["whole"] and "the last token is always computed" in texts["whole"]
    assert "8 tokens with pages but no state" in texts["parted"]
    assert "a state is kept at 8" in texts["parted"]
    assert Miss.SHORT.value in texts["short"]
    assert "State at 20 (prompt_end): stored" in str(engine.manager.explain("r1"))
    assert engine.manager.explain("nobody") is None


def test_explanations_of_what_is_gone():
    engine = Engine(settings())
    engine.serve(document(1, 22))
    engine.manager.evict(num_slots=39)
    hit = engine.hit(document(1, 22))
    assert (hit.reason, hit.detail) == (Miss.STATE_EVICTED, "evicted")
    engine.manager.evict(num_pages=199)
    hit = engine.hit(document(1, 22))
    assert (hit.reason, hit.detail, hit.attention_tokens) == (Miss.EVICTED, "evicted", 0)


def test_reports_do_not_pile_up():
    engine = Engine(settings())
    for n in range(1100):
        engine.manager.begin_step()
        engine.admit(engine.new([n, 1, 2]))
        engine.abort(engine.clients[f"r{n + 1}"])
        engine.manager.end_step()
    assert len(engine.manager._reports._reports) == 1024
    assert engine.manager.explain("r1") is None and engine.manager.explain("r1100") is not None


def test_events():
    """vLLM's names for routers; pages and slots for tiers."""
    manager = CacheManager(settings(), record_events=True)
    engine = Engine(settings())
    engine.manager = manager
    engine.serve(document(1, 10), root=Root("model", adapter=("lora", 3)))
    events = manager.events()
    assert [(e.action, e.group, e.num_tokens) for e in events] == [
        ("stored", "mla", 4),
        ("stored", "mla", 8),
        ("stored", "kda", 8),
    ]
    first, second, state = (event.to_vllm(4) for event in events)
    assert first["type"] == "BlockStored" and first["token_ids"] == document(1, 4)
    assert first["parent_block_hash"] is None and first["lora_id"] == "lora"
    assert second["parent_block_hash"] == first["block_hashes"][0] and state is None
    manager.evict(num_pages=199)
    removed = manager.events()
    assert {(e.action, e.group) for e in removed} == {("removed", "mla"), ("removed", "kda")}
    assert {e.items for e in removed} == {e.items for e in events}
    manager.reset()
    assert [e.to_vllm(4) for e in manager.events()] == [{"type": "AllBlocksCleared"}]


# Misuse.


def test_calls_out_of_order_are_refused():
    engine = Engine(settings())
    manager = engine.manager
    client = engine.new(document(1, 20))
    with pytest.raises(RuntimeError, match="begin_step"):
        manager.reserve(client.request)
    manager.begin_step()
    with pytest.raises(RuntimeError, match="not ended"):
        manager.begin_step()
    engine.admit(client)
    with pytest.raises(ValueError, match="admitted already"):
        manager.reserve(client.request)
    with pytest.raises(ValueError, match="are not known"):
        manager.extend("r1", 21)
    engine.extend(client, 20)
    with pytest.raises(ValueError, match="scheduled already"):
        manager.extend("r1", 1, Pass.DECODE)
    plan = manager.end_step()
    with pytest.raises(ValueError, match="oldest step"):
        manager.commit(plan.step_id, {"r1": RowResult(20)})
    engine.execute(plan)
    manager.dispatched(plan.step_id)
    with pytest.raises(ValueError, match="dispatched"):
        manager.dispatched(plan.step_id)
    for results, message in (
        ({}, "missing"),
        ({"r1": RowResult(19)}, "computed 19 of a row of 20"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.commit(plan.step_id, results)
    engine.settle()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_prompt_tokens": 0}, "prompt"),
        ({"num_prompt_tokens": 4}, "prompt"),
        ({"pin_ttl_s": 0.0}, "cache_pin_ttl_s"),
        ({"pin_ttl_s": float("nan")}, "cache_pin_ttl_s"),
        ({"pin_ttl_s": float("inf")}, "cache_pin_ttl_s"),
        ({"priority": 101}, "cache_priority"),
        ({"priority": 0.5}, "cache_priority"),
        ({"checkpoints": (4,)}, "cache_checkpoints"),
    ],
)
def test_bad_requests_name_the_field(fields, field):
    arguments = {"num_prompt_tokens": 3} | fields
    with pytest.raises(RequestError) as error:
        CacheRequest("r", HashChain(ROOT, 4, [1, 2, 3]), **arguments)
    assert error.value.field == field


def test_the_chain_has_the_match_unit_of_the_cache():
    engine = Engine(settings())
    engine.manager.begin_step()
    with pytest.raises(ValueError, match="match unit"):
        engine.manager.reserve(CacheRequest("r", HashChain(ROOT, 8, [1]), 1))


# Cost.


def decode_seconds(context: int, steps: int = 300) -> float:
    """Median time of the manager in one decode step behind so many tokens."""
    sizes = settings(num_pages=(context + steps) // 64 + 9, page_size=64, match_unit=64)
    manager = CacheManager(sizes)
    request = CacheRequest("r", HashChain(ROOT, 64, [1] * context), context)
    seconds = []
    for step in range(steps + 1):
        start = time.perf_counter()
        manager.begin_step()
        if step == 0:
            assert isinstance(manager.reserve(request), Admission)
        size = context if step == 0 else 1
        row = manager.extend("r", size, Pass.DECODE if step else Pass.PREFILL)
        assert isinstance(row, RowPlan)
        plan = manager.end_step()
        manager.dispatched(plan.step_id)
        request.chain.extend([2])
        manager.commit(plan.step_id, {"r": RowResult(size)})
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def test_a_decode_step_costs_the_same_behind_a_million_tokens():
    """S-13. The bound of 1.2 is for quiet machines; 2 is for shared ones, and O(n) would be 100."""
    short, long = decode_seconds(1 << 10), decode_seconds(1 << 20)
    assert long < 2 * short + 20e-6
