"""The cache manager: who may resume where, which pages and slots a step uses, what is published.

It runs on the host and never calls the device. A scheduling pass is

    begin_step, then for each request lookup, reserve (once) and extend, then end_step -> StepPlan

and after it the caller runs the plan and says `dispatched`, later `commit` with the rows' results;
or `fail`. One step may be dispatched before the one before it is committed. `finish`, `abort`,
`preempt` are allowed at any time.

What a step writes becomes visible in three stages (the commit fence): planned while the step is
put together, written once it was dispatched, published once its row came back finite; from the
next pass on others can resume from it. So nothing is published that was never written (C-8), that
is not finite (C-13), or whose tokens are not final (C-10).
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceOf

from k3jax.cache.events import CacheEvent, EventLog
from k3jax.cache.index import Index, Node
from k3jax.cache.pages import Pool, PoolCounts
from k3jax.cache.report import CacheReport, CacheStats
from k3jax.cache.request import Admission, CacheRequest, Defer, Hit, Miss, NoSpace
from k3jax.cache.retention import Checkpoint, Kind, Pins, hit_limit, plan_retention
from k3jax.cache.sequence import Fence, Row, Sequence, Snapshot, StepRecord
from k3jax.cache.settings import CacheSettings
from k3jax.cache.step import Export, PageCopy, Pass, RowPlan, RowResult, SlotCopy, StepPlan
from k3jax.errors import RequestError

REPORTS = 1024  # reports of the latest requests are kept


class CacheManager:
    """MLA pages and KDA slots of one engine. Not thread-safe: one scheduler owns it.

    Invariants after every call, by the numbers of the serving page: every item in one place (C-6),
    nothing held is evicted, overwritten, zeroed or given away (C-7), item 0 never handed out (S-8,
    S-9), every prefix in the index can be resumed as it says (C-15, C-19).
    """

    def __init__(
        self,
        settings: CacheSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        record_events: bool = False,
    ):
        self.settings = settings
        self.pages = Pool(settings.num_pages)
        self.slots = Pool(settings.num_slots)
        self.stats = CacheStats()
        self.epoch = 0  # counts `restart`
        self._events = EventLog(enabled=record_events)
        self.index = Index(settings, self.pages, self.slots, self._events)
        self.pins = Pins(self.pages, self.slots, settings.max_pinned_fraction, clock)
        self._sequences: dict[str, Sequence] = {}
        self._leaving: list[Sequence] = []
        self._open: StepRecord | None = None
        self._under_way: OrderedDict[int, StepRecord] = OrderedDict()
        self._num_steps = 0
        self._reports: OrderedDict[str, CacheReport] = OrderedDict()

    # Before admission.

    def check_fits(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Refuses a request that could not run even with the whole pool to itself (S-4)."""
        room = (self.settings.num_pages - 1) * self.settings.page_size
        for field, count in (
            ("prompt", num_prompt_tokens + 1),
            ("max_tokens", num_prompt_tokens + max_new_tokens),
        ):
            if count > room:
                raise RequestError(
                    f"the request needs room for {count} tokens in the cache, which holds {room}",
                    field=field,
                )

    def lookup(self, request: CacheRequest) -> Hit:
        """What the cache holds of the request's tokens now. Changes nothing.

        Pages are looked up to the longest published run, the state at the last point in it (C-1).
        """
        if not self.settings.enable_prefix_caching:
            return Hit(reason=Miss.DISABLED)
        if not request.read_cache:
            return Hit(reason=Miss.NOT_READ)
        chain, unit = request.chain, self.settings.match_unit
        limit = hit_limit(self.settings, len(chain))
        if limit < unit:
            return Hit(reason=Miss.SHORT)
        deepest = self.index.deepest(chain, limit)
        state, detail = self.index.deepest_state(deepest)
        attention_tokens = deepest.num_tokens if deepest else 0
        num_tokens = state.num_tokens if state else 0
        reason: Miss | None
        if num_tokens < attention_tokens:
            reason = Miss.STATE_EVICTED if detail else Miss.NO_STATE
        elif num_tokens == limit // unit * unit:
            reason = None
        else:
            detail = self.index.cause("mla", chain.hashes[num_tokens // unit])
            known = num_tokens or chain.root.digest in self.index.roots
            reason = Miss.EVICTED if detail else Miss.UNSEEN if known else Miss.ROOT
        return Hit(
            num_tokens=num_tokens,
            attention_tokens=attention_tokens,
            pending_tokens=self._pending(request, limit),
            reason=reason,
            detail=detail,
            node=state,
        )

    def available(self) -> tuple[int, int]:
        """(pages, slots) that could be handed out now, evictable ones included."""
        return self.pages.available, self.slots.available

    # A scheduling pass.

    def begin_step(self) -> None:
        """Opens a pass. Everything committed so far is visible to its lookups."""
        if self._open is not None:
            raise RuntimeError("the last scheduling pass was not ended")
        self.pins.expire()
        self._open = StepRecord(self._num_steps)
        self._num_steps += 1

    def reserve(
        self,
        request: CacheRequest,
        hit: Hit | None = None,
        *,
        num_tokens: int = 0,
        wait: bool = True,
    ) -> Admission | Defer | NoSpace:
        """Admits a request: references its hit, gives it a running slot, plans the copies.

        num_tokens: new tokens that must have room as well; an `extend` by so many right after it
        succeeds. wait: allow `Defer`. Where the answer is not an `Admission`, nothing has changed.
        A `hit` that was overtaken by evictions is looked up again.

        When no other request is live, a hit that leaves no room to go on is not used, so that what
        passed `check_fits` can always start (S-4, S-5).
        """
        step = self._pass()
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is admitted already")
        if hit is None or (hit.node is not None and (not hit.node.alive or hit.node.slot is None)):
            hit = self.lookup(request)
        if wait and hit.pending_tokens - hit.num_tokens >= self.settings.min_gain:
            self._report(request, hit).num_deferrals += 1
            self.stats.deferrals += 1
            return Defer(hit, hit.pending_tokens)
        short = self._shortage(hit, num_tokens)
        if short is not None and hit.num_tokens and not self._sequences and not self._leaving:
            self.pins.release_all()
            hit = dataclasses.replace(hit, num_tokens=0, node=None)
            short = self._shortage(hit, num_tokens)
        if short is not None:
            return short

        # All that the hit needs is held before anything is evicted for this request.
        length, size = hit.num_tokens, self.settings.page_size
        shared, source = [], 0
        if hit.node is not None:
            shared = self.index.path_pages(hit.node)
            for page in shared:
                self.pages.retain(page)
            source = hit.node.slot or 0
            self.slots.retain(source)
            if request.priority:
                self._raise_priority(hit.node, request.priority)
        report = self._report(request, hit)
        report.num_admissions += 1
        slot = self._take_slot(steal=True)
        assert slot is not None
        sequence = Sequence(
            request=request,
            slot=slot,
            pages=shared,
            plan=plan_retention(
                self.settings,
                request.num_prompt_tokens,
                junction=hit.junction,
                directed=request.checkpoints,
            ),
            report=report,
            num_hit=length,
            num_computed=length,
            num_scheduled=length,
            last_checkpoint=length,
            source=hit.node,
            tip=hit.node,
            num_published=length // self.settings.match_unit,
            publishable=self.settings.enable_prefix_caching,
        )
        self._sequences[request.request_id] = sequence
        row = step.row(sequence)
        if source:
            row.slot_copies.append(SlotCopy(source, slot, length))
            row.held.append((self.slots, source))
        else:
            row.zero_slot = True
        if length % size:
            self._copy_last_page(sequence, row, length % size)
        self._renew_pins(sequence)
        return Admission(length, slot, tuple(sequence.pages))

    def clip(self, request_id: str, num_tokens: int, kind: Pass = Pass.PREFILL) -> int:
        """The largest number of tokens up to `num_tokens` after which the row may end.

        A prefill ends with the known tokens, at a multiple of `scheduler_alignment`, or at a
        checkpoint that cannot be exported on the way; 0 if the budget reaches none of these. A
        device loop ends where a state is to be copied.
        """
        sequence = self._live(request_id)
        start, known = sequence.num_scheduled, len(sequence.request.chain)
        if kind is Pass.VERIFY or (kind is Pass.DECODE and num_tokens <= 1):
            return num_tokens
        if kind is Pass.DECODE:
            ahead = sequence.plan.next_after(start)
            return num_tokens if ahead is None else min(num_tokens, ahead.position - start)
        end = min(start + num_tokens, known)
        if end < known:
            end = end // self.settings.scheduler_alignment * self.settings.scheduler_alignment
        exports = 0
        after = max(start, sequence.last_checkpoint)
        for checkpoint in sequence.plan.between(after, end - 1, decode_end=False):
            exports += 1
            inside = checkpoint.position % self.settings.kda_chunk == 0
            if exports > self.settings.exports_per_segment or not inside:
                end = checkpoint.position
                break
        return max(0, end - start)

    def extend(
        self, request_id: str, num_tokens: int, kind: Pass = Pass.PREFILL
    ) -> RowPlan | NoSpace:
        """Schedules the next `num_tokens` of a request, drafts included, in this step.

        Gives it the pages they need and plans the states to keep. O(new pages), whatever the
        length of the context (S-13). `NoSpace` has changed nothing.
        """
        step, sequence = self._pass(), self._live(request_id)
        start, known = sequence.num_scheduled, len(sequence.request.chain)
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: a row computes at least one token")
        if kind is Pass.PREFILL and start + num_tokens > known:
            raise ValueError(
                f"a prefill up to {start + num_tokens} needs tokens; {known} are known"
            )
        if sequence in step.rows and step.rows[sequence].num_tokens:
            raise ValueError(f"request {request_id} is scheduled already in this step")
        needed = self.settings.pages_for(start + num_tokens) - len(sequence.pages)
        if needed > self.pages.available:
            return NoSpace(pages=needed - self.pages.available)
        row = step.row(sequence)
        row.kind, row.start, row.num_tokens = kind, start, num_tokens
        row.exact = sequence.exact and (kind is Pass.PREFILL or num_tokens == 1)
        row.first_new_page = len(sequence.pages)
        row.new_pages = [self._take_page() for _ in range(needed)]
        sequence.pages += row.new_pages
        for checkpoint in sequence.due():
            self._copy_state(sequence, row, checkpoint)
        sequence.num_scheduled += num_tokens
        sequence.last_kind = kind
        if kind is Pass.PREFILL:
            self._export_states(sequence, row)
        return self._row_plan(row)

    def fork(self, request_id: str, child: CacheRequest) -> Admission | NoSpace:
        """Admits `child` as a copy of a request at its present position: pages are shared, the
        running slot and the last page copied. The parent has no step under way, and its row of
        this step, if any, comes after the fork."""
        step, parent = self._pass(), self._live(request_id)
        if parent.rows or parent in step.rows:
            raise ValueError(f"request {request_id} cannot be forked while a step runs for it")
        if child.request_id in self._sequences:
            raise ValueError(f"request {child.request_id} is admitted already")
        length, size = parent.num_computed, self.settings.page_size
        units = parent.num_published
        if parent.request.chain.hashes[:units][-1:] != child.chain.hashes[:units][-1:]:
            raise ValueError("a fork starts with the tokens of its parent")
        pages = 1 if length % size else 0
        if pages > self.pages.available or not self._slots_to_take():
            return NoSpace(max(0, pages - self.pages.available), 1 - self._slots_to_take())
        shared = parent.pages[: self.settings.pages_for(length)]
        for page in shared:
            self.pages.retain(page)
        self.slots.retain(parent.slot)  # before one is taken, and until the copy is dispatched
        slot = self._take_slot(steal=True)
        assert slot is not None
        report = self._report(child, Hit(num_tokens=length, attention_tokens=length))
        report.num_admissions += 1
        sequence = Sequence(
            request=child,
            slot=slot,
            pages=shared,
            plan=plan_retention(self.settings, child.num_prompt_tokens),
            report=report,
            num_hit=length,
            num_computed=length,
            num_scheduled=length,
            last_checkpoint=length,
            source=parent.source,
            tip=parent.tip,
            num_published=parent.num_published,
            publishable=parent.publishable,
        )
        self._sequences[child.request_id] = sequence
        if child.num_cached_tokens is None:
            child.num_cached_tokens = parent.request.num_cached_tokens
        row = step.row(sequence)
        row.slot_copies.append(SlotCopy(parent.slot, slot, length))
        row.held.append((self.slots, parent.slot))
        if length % size:
            self._copy_last_page(sequence, row, length % size)
        return Admission(length, slot, tuple(sequence.pages))

    def end_step(self) -> StepPlan:
        """Closes the pass. A plan that is not `empty` is answered by `dispatched` or `fail`."""
        step = self._pass()
        self._open = None
        step.zero_pages = self.pages.take_to_zero()
        step.zero_slots = self.slots.take_to_zero()
        plan = StepPlan(step.step_id, list(step.zero_pages), list(step.zero_slots))
        for row in step.rows.values():
            if row.zero_slot and row.sequence.slot not in step.zero_slots:
                plan.zero_slots.append(row.sequence.slot)
            plan.page_copies += row.page_copies
            plan.slot_copies += row.slot_copies
            if row.num_tokens:
                plan.rows.append(self._row_plan(row))
            row.sequence.rows.append(row)
        if not plan.empty:
            self._under_way[step.step_id] = step
        return plan

    # After a pass.

    def dispatched(self, step_id: int) -> None:
        """The step was handed to the device without error: what it writes is written (C-8)."""
        step = self._under_way.get(step_id)
        if step is None or step.dispatched:
            raise ValueError(f"step {step_id} is not waiting to be dispatched")
        step.dispatched = True
        for row in step.rows.values():
            row.release_held()
            for snapshot in row.snapshots:
                if snapshot.fence is Fence.PLANNED:
                    snapshot.fence = Fence.WRITTEN
            self._count_first_schedule(row)

    def commit(self, step_id: int, results: Mapping[str, RowResult]) -> list[str]:
        """Takes in the results of the oldest step under way, and publishes what they confirm.

        Each live request's row needs a result. One of a request that has ended since may have one:
        then what was written for it before its end is published too (without, it is dropped).
        Final sampled tokens are in the chains already. Returns the requests whose row was not
        finite: nothing of them is published, they hold nothing any more and must end (C-13).
        """
        step = self._under_way.get(step_id)
        if step is None or not step.dispatched or step_id != next(iter(self._under_way)):
            raise ValueError(f"step {step_id} is not the oldest step under way")
        for row in step.rows.values():
            self._check_result(row, results.get(row.sequence.request_id))
        del self._under_way[step_id]
        quarantined = []
        for row in step.rows.values():
            sequence = row.sequence
            sequence.rows.remove(row)
            result = results.get(sequence.request_id) if row.num_tokens else RowResult(0)
            if result is not None and not result.finite and not sequence.gone:
                self._quarantine(sequence, row)
                quarantined.append(sequence.request_id)
            else:
                self._settle(sequence, row, result)
            if sequence.leaving and not sequence.rows and not sequence.gone:
                self._release(sequence)
        return quarantined

    def fail(self, step_id: int) -> list[str]:
        """The step did not run, nor will any after it. Nothing they were to write is published
        (C-8); their requests lose what they hold and must be admitted again: returns their ids.

        Without an open pass. If the pools are lost as well, `restart` is the answer instead.
        """
        if self._open is not None:
            raise RuntimeError("a step cannot fail inside a scheduling pass")
        if step_id not in self._under_way:
            raise ValueError(f"step {step_id} is not under way")
        failed = [step for step in self._under_way.values() if step.step_id >= step_id]
        lost: dict[Sequence, None] = {}
        for step in failed:
            del self._under_way[step.step_id]
            self.pages.zero_again(step.zero_pages)
            self.slots.zero_again(step.zero_slots)
            for row in step.rows.values():
                self._undo(row)
                row.sequence.rows.remove(row)
                lost[row.sequence] = None
        ids = []
        for sequence in lost:
            if sequence.gone:
                continue
            if not sequence.leaving:
                ids.append(sequence.request_id)
                self._keep_state(sequence, running=False)
            self._release(sequence)
        return ids

    # The end of a request.

    def finish(self, request_id: str) -> None:
        """The request ended by itself. Its latest state is kept for the next turn; what a step
        under way computes beyond its final tokens is ignored (C-12)."""
        sequence = self._live(request_id)
        self._cancel(sequence)
        if self.settings.decode_end:
            self._keep_state(sequence)
        self._release(sequence)
        sequence.report.closed = True

    def preempt(self, request_id: str) -> None:
        """Takes back all that a request holds, at once. What is verified stays in the index, so
        that the request, admitted again, goes on from there."""
        sequence = self._live(request_id)
        self._cancel(sequence)
        self._keep_state(sequence)
        self._release(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; False if it holds nothing (S-3).

        What dispatched steps still write for it is published when they are committed; until then,
        that is for at most the steps under way, its pages stay held.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._cancel(sequence)
        if sequence.tail is not None:
            self._drop(sequence.tail)
            sequence.tail = None
        sequence.report.closed = True
        if sequence.rows:
            sequence.leaving = True
            self._leaving.append(sequence)
            del self._sequences[request_id]
        else:
            self._release(sequence)
        return True

    # Maintenance.

    def evict(self, num_pages: int = 0, num_slots: int = 0) -> tuple[int, int]:
        """Frees idle items until so many are free; returns how many are."""
        while self.slots.num_free < num_slots and self.index.evict_slot():
            pass
        while self.pages.num_free < num_pages and self.index.evict_page():
            pass
        return self.pages.num_free, self.slots.num_free

    def reset(self, *, root: bytes | None = None, salt: str | None = None) -> None:
        """Forgets all prefixes, or those of one root (its digest) or one salt.

        Live requests go on with what they hold, but publish nothing any more.
        """
        everything = root is None and salt is None

        def matches(digest: bytes, cache_salt: str | None) -> bool:
            return everything or digest == root or (salt is not None and cache_salt == salt)

        for digest, node in list(self.index.roots.items()):
            assert node.root is not None
            if matches(digest, node.root.cache_salt):
                self.index.drop(node, "reset")
        self.pins.release_dead()
        for sequence in self._all_sequences():
            of = sequence.request.chain.root
            if matches(of.digest, of.cache_salt):
                sequence.publishable = False
                sequence.tip = sequence.source = None
        if everything:
            self._events.record(CacheEvent("cleared", "mla"))

    def restart(self) -> list[str]:
        """The device's pools are lost and made anew: everything is forgotten. Returns the ids of
        the requests that were live, which must be admitted again."""
        ids = list(self._sequences)
        self.pages, self.slots = Pool(self.settings.num_pages), Pool(self.settings.num_slots)
        self.index = Index(self.settings, self.pages, self.slots, self._events)
        self.pins = Pins(self.pages, self.slots, self.settings.max_pinned_fraction, self.pins.clock)
        self._sequences.clear()
        self._leaving.clear()
        self._under_way.clear()
        self._open = None
        self.epoch += 1
        self._events.record(CacheEvent("cleared", "mla"))
        return ids

    def release_pins(self) -> None:
        """Ends all pins: for a scheduler whose last running request has no room otherwise."""
        self.pins.release_all()

    # Reading.

    def page_table(self, request_id: str) -> SequenceOf[int]:
        """The request's pages in order. A view: read it, and do not keep it."""
        return self._live(request_id).pages

    def usage(self) -> dict[str, PoolCounts]:
        """Items of both pools by place."""
        return {"pages": self.pages.counts(), "slots": self.slots.counts()}

    def events(self) -> list[CacheEvent]:
        """What was stored and removed since the last call; empty unless events are recorded."""
        return self._events.take()

    def explain(self, request: CacheRequest | str) -> CacheReport | None:
        """Why a request's prefix hit or missed; `str()` of it is text. By id for requests of late;
        a request that was never reserved is looked up."""
        name = request if isinstance(request, str) else request.request_id
        if name in self._reports:
            return self._reports[name]
        if isinstance(request, str):
            return None
        return self._new_report(request, self.lookup(request))

    # Parts of a pass.

    def _pass(self) -> StepRecord:
        if self._open is None:
            raise RuntimeError("not inside a scheduling pass: call begin_step first")
        return self._open

    def _live(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise KeyError(f"request {request_id} holds nothing in the cache")
        return sequence

    def _all_sequences(self) -> Iterable[Sequence]:
        yield from self._sequences.values()
        yield from self._leaving

    def _pending(self, request: CacheRequest, limit: int) -> int:
        """The longest boundary of this request that steps under way are about to publish."""
        hashes, unit = request.chain.hashes, self.settings.match_unit
        longest = 0
        steps = list(self._under_way.values()) + ([self._open] if self._open else [])
        for step in steps:
            for row in step.rows.values():
                for snapshot in row.snapshots:
                    position = snapshot.position
                    if not snapshot.under_way or not longest < position <= limit:
                        continue
                    writer = snapshot.sequence
                    if snapshot is writer.tail or not snapshot.keep or not writer.publishable:
                        continue
                    at = position // unit - 1
                    known = writer.request.chain.hashes
                    if at < min(len(hashes), len(known)) and hashes[at] == known[at]:
                        longest = position
        return longest

    def _shortage(self, hit: Hit, num_tokens: int) -> NoSpace | None:
        """What is missing to admit a request with this hit and so many new tokens."""
        length, size = hit.num_tokens, self.settings.page_size
        pages = self.settings.pages_for(length + num_tokens) - length // size
        slots = 1
        if hit.node is not None:  # its idle items will not be available any more
            pages += sum(map(self.pages.is_idle, self.index.path_pages(hit.node)))
            slots += self.slots.is_idle(hit.node.slot or 0)
        pages -= self.pages.available
        slots -= self._slots_to_take()
        if pages > 0 or slots > 0:
            return NoSpace(max(0, pages), max(0, slots))
        return None

    def _slots_to_take(self) -> int:
        """Slots available to a request that must have one; enough for one is enough to know."""
        return self.slots.available + (self.slots.available < 2) * len(self._tails())

    def _tails(self) -> list[Snapshot]:
        """States kept aside that a request may take the slot of."""
        tails = (sequence.tail for sequence in self._sequences.values())
        return [tail for tail in tails if tail is not None and tail.fence is not Fence.PLANNED]

    def _take_slot(self, *, steal: bool = False) -> int | None:
        """A slot, with the least valuable idle state evicted for it if need be.

        steal: take it from a running request that keeps a state aside, if there is no other.
        """
        if not self.slots.num_free and not self.index.evict_slot():
            tails = self._tails() if steal else []
            if not tails:
                return None
            tail = tails[0]
            tail.sequence.tail = None
            self._drop(tail, "its slot went to a new request")
        return self.slots.take()

    def _take_page(self) -> int:
        """A page, with the least valuable idle page evicted for it if need be."""
        if not self.pages.num_free:
            self.index.evict_page()
        return self.pages.take()

    def _copy_last_page(self, sequence: Sequence, row: Row, num_tokens: int) -> None:
        """Replaces the shared last page by a private copy of its first tokens (C-5)."""
        source = sequence.pages[-1]
        target = self._take_page()
        sequence.pages[-1] = target
        row.page_copies.append(PageCopy(source, target, num_tokens))
        row.held.append((self.pages, source))
        self.stats.page_copies += 1

    def _copy_state(self, sequence: Sequence, row: Row, checkpoint: Checkpoint) -> None:
        """Plans the copy of the running slot that a checkpoint asks for, before the row runs."""
        sequence.last_checkpoint = checkpoint.position
        snapshot = self._plan_snapshot(sequence, row, checkpoint)
        if snapshot is not None:
            row.slot_copies.append(SlotCopy(sequence.slot, snapshot.slot, checkpoint.position))

    def _export_states(self, sequence: Sequence, row: Row) -> None:
        """Plans the states that a prefill exports. A checkpoint at its end that is not among them
        is copied before the next row; one inside that cannot be exported is given up (C-14)."""
        end = row.start + row.num_tokens
        after = max(row.start, sequence.last_checkpoint)
        for checkpoint in sequence.plan.between(after, end, decode_end=False):
            position = checkpoint.position
            if len(row.exports) < self.settings.exports_per_segment and (
                position % self.settings.kda_chunk == 0 or position == end
            ):
                snapshot = self._plan_snapshot(sequence, row, checkpoint)
                if snapshot is not None:
                    row.exports.append(Export(position, snapshot.slot))
            elif position < end:
                self._skip(sequence, checkpoint, "the pass could not write a state there")
            else:
                break
            sequence.last_checkpoint = position

    def _plan_snapshot(
        self, sequence: Sequence, row: Row, checkpoint: Checkpoint
    ) -> Snapshot | None:
        """A slot for a state that this row writes; None where it is stored already or none is free.

        The state kept aside for the end of the answer replaces the one before it in place: its
        tokens are known to be final, so that the older one is not needed any more.
        """
        if not sequence.publishable:
            return None
        unit = self.settings.match_unit
        node = self.index.nodes.get(sequence.request.chain.hashes[checkpoint.position // unit - 1])
        if node is not None and node.slot is not None:
            self.slots.touch(node.slot)
            self._skip(sequence, checkpoint, "stored already")
            self._pin(sequence, node, checkpoint)
            return None
        aside = checkpoint.kind is Kind.DECODE_END
        if aside and sequence.tail is not None:
            slot: int | None = sequence.tail.slot
            sequence.tail.fence = Fence.DROPPED
        else:
            slot = self._take_slot()
        if slot is None:
            self._skip(sequence, checkpoint, "no slot was free")
            return None
        snapshot = Snapshot(sequence, checkpoint, slot, keep=not aside)
        row.snapshots.append(snapshot)
        if aside:
            sequence.tail = snapshot
        else:
            sequence.report.note(checkpoint.position, checkpoint.kind.value, "planned")
        return snapshot

    def _row_plan(self, row: Row) -> RowPlan:
        return RowPlan(
            request_id=row.sequence.request_id,
            slot=row.sequence.slot,
            start=row.start,
            num_tokens=row.num_tokens,
            kind=row.kind,
            exact=row.sequence.exact,
            first_new_page=row.first_new_page,
            new_pages=tuple(row.new_pages),
            exports=tuple(row.exports),
        )

    def _count_first_schedule(self, row: Row) -> None:
        request = row.sequence.request
        if not row.num_tokens or request.num_cached_tokens is not None:
            return
        hit = row.sequence.report.hit
        request.num_cached_tokens = row.sequence.num_hit
        self.stats.queries += 1
        self.stats.hits += hit.num_tokens > 0
        self.stats.query_tokens += len(request.chain)
        self.stats.hit_tokens += hit.num_tokens
        self.stats.attention_hit_tokens += hit.attention_tokens
        if hit.reason is not None:
            self.stats.misses[hit.reason] += 1

    # Results.

    def _check_result(self, row: Row, result: RowResult | None) -> None:
        """Refuses a commit that does not fit the step, before anything is changed."""
        sequence = row.sequence
        if not row.num_tokens or sequence.gone or (sequence.leaving and result is None):
            return
        if result is None:
            raise ValueError(f"the result of request {sequence.request_id} is missing")
        low = row.num_tokens if row.kind is Pass.PREFILL else 0
        if result.finite and not low <= result.num_computed <= row.num_tokens:
            raise ValueError(
                f"request {sequence.request_id} computed {result.num_computed} of a row of "
                f"{row.num_tokens} tokens"
            )

    def _settle(self, sequence: Sequence, row: Row, result: RowResult | None) -> None:
        """Takes in a row that came back finite, or of which nothing is known any more."""
        if result is None or not result.finite:
            for snapshot in row.snapshots:
                self._drop(snapshot)
            return
        if not sequence.gone:
            if row.kind is Pass.VERIFY:
                sequence.verify_start = sequence.num_computed
            sequence.num_computed += result.num_computed
            sequence.num_scheduled -= row.num_tokens - result.num_computed
            sequence.proven = sequence.proven or row.num_tokens > 0
            self._publish(sequence)
        for snapshot in row.snapshots:
            if snapshot.fence is not Fence.WRITTEN:
                continue
            if snapshot is sequence.tail:
                snapshot.fence = Fence.VERIFIED
            else:
                self._publish_snapshot(snapshot)

    def _publish(self, sequence: Sequence) -> None:
        """Publishes the complete units of final, verified tokens that are not yet; O(new units)."""
        if not sequence.publishable:
            return
        chain, unit, size = (
            sequence.request.chain,
            self.settings.match_unit,
            self.settings.page_size,
        )
        last = sequence.num_final // unit
        if last <= sequence.num_published:
            return
        if sequence.tip is not None and not sequence.tip.alive:
            # Pages of others on its path were evicted: its own hold the same tokens.
            sequence.tip = self.index.deepest(chain, sequence.num_published * unit)
            sequence.num_published = sequence.tip.num_tokens // unit if sequence.tip else 0
        for at in range(sequence.num_published, last):
            pages = tuple(sequence.pages[at * unit // size : -(-(at + 1) * unit // size)])
            node = self.index.add(chain, at, sequence.tip, pages, sequence.request.priority)
            sequence.has_duplicates = sequence.has_duplicates or node.pages != pages
            sequence.tip = node
        sequence.num_published = last

    def _publish_snapshot(self, snapshot: Snapshot) -> None:
        """Publishes a verified state where its prefix is published (C-11, C-15), else drops it."""
        sequence, position = snapshot.sequence, snapshot.position
        node = None
        if sequence.publishable and snapshot.keep and position <= sequence.num_final:
            at = position // self.settings.match_unit - 1
            node = self.index.nodes.get(sequence.request.chain.hashes[at])
        if node is None:
            self._drop(snapshot, "its prefix is not in the index")
        elif not self.index.add_state(node, snapshot.slot):
            self._drop(snapshot, "stored already")
        else:
            snapshot.fence = Fence.PUBLISHED
            self.slots.release(snapshot.slot)
            kind = snapshot.checkpoint.kind.value
            self.stats.snapshots[kind] += 1
            sequence.report.note(position, kind, "stored")
            self._pin(sequence, node, snapshot.checkpoint)
            if sequence.tail is not None and sequence.tail.position <= position:
                self._drop(sequence.tail)
                sequence.tail = None

    def _quarantine(self, sequence: Sequence, row: Row) -> None:
        """Takes everything a non-finite row wrote out of the index, to be zeroed (C-13).

        If no row was finite since the request resumed, what it resumed from is suspect as well.
        """
        self.stats.nonfinite_rows += 1
        self._cancel(sequence)
        first = sequence.num_hit // self.settings.page_size if sequence.proven else 0
        suspect = list(sequence.pages[first:])
        if sequence.source is not None and not sequence.proven:
            suspect += sequence.source.pages
        for page in suspect:
            for node in list(self.index.on_page(page)):
                self.index.drop(node, "not finite", quarantine=True)
            if self.pages.references(page):
                self.pages.quarantine(page)
        self.slots.quarantine(sequence.slot)
        snapshots = [snapshot for row in [row, *sequence.rows] for snapshot in row.snapshots]
        snapshots += [sequence.tail] if sequence.tail is not None else []
        sequence.tail = None
        for snapshot in snapshots:
            if snapshot.fence not in (Fence.DROPPED, Fence.PUBLISHED):
                self.slots.quarantine(snapshot.slot)
                self._drop(snapshot)
        for other in self._all_sequences():
            source = other.source
            if (source is not None and source.poisoned) or any(
                map(self.pages.is_quarantined, other.pages)
            ):
                other.publishable = False
        self._release(sequence)
        sequence.report.closed = True
        self.pins.release_dead()

    # Ends.

    def _cancel(self, sequence: Sequence) -> None:
        """Takes a request out of the pass that is open: as if it had not been scheduled."""
        row = self._open.rows.pop(sequence, None) if self._open is not None else None
        if row is not None:
            self._undo(row)
            sequence.num_scheduled -= row.num_tokens

    def _undo(self, row: Row) -> None:
        row.release_held()
        for snapshot in row.snapshots:
            if snapshot is row.sequence.tail:
                row.sequence.tail = None
            self._drop(snapshot)

    def _keep_state(self, sequence: Sequence, *, running: bool = True) -> None:
        """Publishes the latest state that is exactly at a boundary of final tokens (C-12).

        The running slot itself, if `running` and it stands at one and nothing is under way; else
        the state kept aside, now or when its step is committed.
        """
        here, unit = sequence.num_computed, self.settings.match_unit
        if (
            running
            and not sequence.rows
            and sequence.last_kind is not Pass.VERIFY
            and sequence.num_hit < here == sequence.num_final
            and here % unit == 0
            and sequence.publishable
        ):
            node = self.index.nodes.get(sequence.request.chain.hashes[here // unit - 1])
            if node is not None and self.index.add_state(node, sequence.slot):
                self.stats.snapshots[Kind.DECODE_END.value] += 1
                sequence.report.note(here, Kind.DECODE_END.value, "stored")
                return
        tail = sequence.tail
        if tail is not None:
            sequence.tail = None
            tail.keep = True
            if tail.fence is Fence.VERIFIED:
                self._publish_snapshot(tail)

    def _release(self, sequence: Sequence) -> None:
        """Gives back all that a request holds, exactly once (S-3), its last pages first."""
        if sequence.gone:
            raise RuntimeError(f"request {sequence.request_id} has been released")
        sequence.gone = True
        if sequence.leaving:
            self._leaving.remove(sequence)
        else:
            del self._sequences[sequence.request_id]
        if sequence.tail is not None:
            self._drop(sequence.tail)
            sequence.tail = None
        self.slots.release(sequence.slot)
        for page in reversed(sequence.pages):
            self.pages.release(page)
        if sequence.has_duplicates and sequence.tip is not None and sequence.tip.alive:
            self.index.touch(sequence.tip)

    def _drop(self, snapshot: Snapshot, reason: str = "") -> None:
        """Gives up a state on its way, and its slot."""
        if snapshot.fence in (Fence.DROPPED, Fence.PUBLISHED):
            return
        snapshot.fence = Fence.DROPPED
        self.slots.release(snapshot.slot)
        if reason:
            self._skip(snapshot.sequence, snapshot.checkpoint, reason)

    def _skip(self, sequence: Sequence, checkpoint: Checkpoint, reason: str) -> None:
        self.stats.skipped_snapshots[reason] += 1
        sequence.report.note(checkpoint.position, checkpoint.kind.value, reason)

    # Pins, priorities, reports.

    def _raise_priority(self, node: Node | None, priority: int) -> None:
        while node is not None:
            self.index.raise_priority(node, priority)
            node = node.parent

    def _pinned_positions(self, sequence: Sequence) -> set[int]:
        """Boundaries that the request asks to pin: where it directs, else the end of its prompt."""
        if sequence.request.pin_ttl_s is None:
            return set()
        fixed = sequence.plan.fixed
        kind = Kind.DIRECTED if sequence.request.checkpoints else Kind.PROMPT_END
        return {checkpoint.position for checkpoint in fixed if checkpoint.kind is kind}

    def _renew_pins(self, sequence: Sequence) -> None:
        """Pins again what is stored already of the positions that the request asks for."""
        for position in self._pinned_positions(sequence):
            if position <= sequence.num_hit:
                hash = sequence.request.chain.hashes[position // self.settings.match_unit - 1]
                node = self.index.nodes.get(hash)
                if node is not None and node.slot is not None:
                    self._pin(sequence, node, Checkpoint(position, Kind.DIRECTED))

    def _pin(self, sequence: Sequence, node: Node, checkpoint: Checkpoint) -> None:
        ttl = sequence.request.pin_ttl_s
        if ttl is None or checkpoint.position not in self._pinned_positions(sequence):
            return
        pinned = self.pins.pin(node, self.index.path_pages(node), ttl)
        sequence.report.pinned = pinned
        self.stats.pins_refused += not pinned

    def _new_report(self, request: CacheRequest, hit: Hit) -> CacheReport:
        return CacheReport(
            request_id=request.request_id,
            num_tokens=len(request.chain),
            match_unit=self.settings.match_unit,
            limit=hit_limit(self.settings, len(request.chain)),
            hit=dataclasses.replace(hit, node=None),  # nodes would keep others in memory
        )

    def _report(self, request: CacheRequest, hit: Hit) -> CacheReport:
        """The request's report, updated by its latest lookup; new if it is a new request."""
        report, old = self._new_report(request, hit), self._reports.get(request.request_id)
        if old is not None and not old.closed:
            old.num_tokens, old.limit, old.hit = report.num_tokens, report.limit, report.hit
            return old
        self._reports[request.request_id] = report
        self._reports.move_to_end(request.request_id)
        if len(self._reports) > REPORTS:
            self._reports.popitem(last=False)
        return report
