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
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from k3jax.cache.events import CacheEvent, EventLog
from k3jax.cache.index import Index, Node
from k3jax.cache.pages import Pool, PoolCounts
from k3jax.cache.report import CacheReport, CacheStats, Reports
from k3jax.cache.request import Admission, CacheRequest, Defer, Hit, Miss, NoSpace
from k3jax.cache.retention import Pins, hit_limit, plan_retention
from k3jax.cache.sequence import Fence, Row, Sequence, StepRecord
from k3jax.cache.settings import CacheSettings
from k3jax.cache.snapshots import Snapshots
from k3jax.cache.step import PageCopy, Pass, RowPlan, RowResult, SlotCopy, StepPlan
from k3jax.errors import RequestError


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
        self.stats = CacheStats()
        self.epoch = 0  # counts `restart`
        self._clock = clock
        self._events = EventLog(enabled=record_events)
        self._sequences: dict[str, Sequence] = {}
        self._leaving: list[Sequence] = []
        self._open: StepRecord | None = None
        self._under_way: OrderedDict[int, StepRecord] = OrderedDict()
        self._num_steps = 0
        self._reports = Reports(settings)
        self._make_pools()

    def _make_pools(self) -> None:
        settings = self.settings
        self.pages = Pool(settings.num_pages)
        self.slots = Pool(settings.num_slots)
        self.index = Index(settings, self.pages, self.slots, self._events, self.stats.evictions)
        self.pins = Pins(self.pages, self.slots, settings.max_pinned_fraction, self._clock)
        self.snapshots = Snapshots(settings, self.index, self.pins, self.stats, self._sequences)

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
            pending_tokens=self.snapshots.pending(self.steps(), chain, limit),
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

        When no other request is live, pins and a hit that leaves no room to go on are given up, so
        that what passed `check_fits` can always start (S-4, S-5).
        """
        step = self._pass()
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is admitted already")
        if request.chain.match_unit != self.settings.match_unit:
            raise ValueError(f"the chain of {request.request_id} has another match unit")
        if hit is None or not self._is_current(hit):
            hit = self.lookup(request)
        if wait and hit.pending_tokens - hit.num_tokens >= self.settings.min_gain:
            self._reports.update(request, hit).num_deferrals += 1
            self.stats.deferrals += 1
            return Defer(hit, hit.pending_tokens)
        short = self._shortage(hit, num_tokens)
        if short is not None and not self._sequences and not self._leaving:
            self.pins.release_all()
            short = self._shortage(hit, num_tokens)
            if short is not None and hit.num_tokens:
                hit = dataclasses.replace(hit, num_tokens=0, node=None, reason=Miss.NO_ROOM)
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
        report = self._reports.update(request, hit)
        report.num_admissions += 1
        slot = self.snapshots.take_running_slot()
        assert slot is not None
        sequence = Sequence(
            request=request,
            slot=slot,
            pages=shared,
            retention=plan_retention(
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
        self.snapshots.renew_pins(sequence)
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
            ahead = sequence.retention.next_after(start)
            return num_tokens if ahead is None else min(num_tokens, ahead.position - start)
        end = min(start + num_tokens, known)
        if end < known:
            end = end // self.settings.scheduler_alignment * self.settings.scheduler_alignment
        after = max(start, sequence.last_checkpoint)
        inside = sequence.retention.between(after, end - 1, decode_end=False)
        for number, checkpoint in enumerate(inside, start=1):
            exportable = checkpoint.position % self.settings.kda_chunk == 0
            if number > self.settings.exports_per_segment or not exportable:
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
                f"{num_tokens} tokens from {start} on are not known: there are {known}"
            )
        if sequence in step.rows and step.rows[sequence].num_tokens:
            raise ValueError(f"request {request_id} is scheduled already in this step")
        needed = self.settings.pages_for(start + num_tokens) - len(sequence.pages)
        if needed > self.pages.available:
            return NoSpace(pages=needed - self.pages.available)
        row = step.row(sequence)
        row.kind, row.start, row.num_tokens = kind, start, num_tokens
        row.exact_start = sequence.exact
        row.first_new_page = len(sequence.pages)
        row.new_pages = [self._take_page() for _ in range(needed)]
        sequence.pages += row.new_pages
        self.snapshots.copy_due(sequence, row)
        sequence.num_scheduled += num_tokens
        if kind is Pass.PREFILL:
            self.snapshots.export(sequence, row)
        return row.finish_planning()

    def fork(self, request_id: str, child: CacheRequest) -> Admission | NoSpace:
        """Admits `child` as a copy of a request at its present position: pages are shared, the
        running slot and the last page copied. The parent has no step under way, and its row of
        this step, if any, comes after the fork."""
        step, parent = self._pass(), self._live(request_id)
        if parent in step.rows or any(row.num_tokens for row in parent.rows):
            raise ValueError(f"request {request_id} cannot be forked while a step runs for it")
        if child.request_id in self._sequences:
            raise ValueError(f"request {child.request_id} is admitted already")
        length, size, unit = parent.num_computed, self.settings.page_size, self.settings.match_unit
        mine, others = parent.request.chain, child.chain
        rest, last = length // unit * unit, length // unit - 1
        if mine.tokens[rest:length] != others.tokens[rest:length] or (
            rest and mine.hashes[last] != others.hashes[last]
        ):
            raise ValueError("a fork starts with the tokens of its parent")
        short = NoSpace(
            max(0, (length % size > 0) - self.pages.available),
            max(0, 1 - self.snapshots.available_slots()),
        )
        if short.pages or short.slots:
            return short
        shared = parent.pages[: self.settings.pages_for(length)]
        for page in shared:
            self.pages.retain(page)
        self.slots.retain(parent.slot)  # before one is taken, and until the copy is dispatched
        slot = self.snapshots.take_running_slot()
        assert slot is not None
        report = self._reports.update(child, Hit(num_tokens=length, attention_tokens=length))
        report.num_admissions += 1
        sequence = Sequence(
            request=child,
            slot=slot,
            pages=shared,
            retention=plan_retention(self.settings, child.num_prompt_tokens),
            report=report,
            num_hit=length,
            num_computed=length,
            num_scheduled=length,
            last_checkpoint=length,
            source=parent.source,
            tip=parent.tip,
            num_published=parent.num_published,
            proven=parent.proven,
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
            if row.plan is not None:
                plan.rows.append(row.plan)
                row.sequence.last_kind = row.kind
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
            if row.num_tokens and row.sequence.request.num_cached_tokens is None:
                row.sequence.request.num_cached_tokens = row.sequence.num_hit
                self.stats.count(row.sequence.report)

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
            row.check(results.get(row.sequence.request_id))
        del self._under_way[step_id]
        quarantined = []
        for row in step.rows.values():
            sequence = row.sequence
            sequence.rows.remove(row)
            result = results.get(sequence.request_id) if row.num_tokens else RowResult(0)
            if result is not None and not result.finite and not sequence.gone:
                quarantined += [sequence.request_id] * (not sequence.leaving)
                self._quarantine(sequence, row)
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
                self.snapshots.keep_latest(sequence, running=False)
            self._release(sequence)
        return ids

    # The end of a request.

    def finish(self, request_id: str) -> None:
        """The request ended by itself. Its latest state is kept for the next turn; what a step
        under way computes beyond its final tokens is ignored (C-12)."""
        sequence = self._live(request_id)
        self._cancel(sequence)
        if self.settings.decode_end:
            self.snapshots.keep_latest(sequence)
        self._release(sequence)
        sequence.report.closed = True

    def preempt(self, request_id: str) -> None:
        """Takes back all that a request holds, at once. What is verified stays in the index, so
        that the request, admitted again, goes on from there."""
        sequence = self._live(request_id)
        self._cancel(sequence)
        self.snapshots.keep_latest(sequence)
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
        self.snapshots.drop_tail(sequence)
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
        for sequence in self.live_sequences():
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
        self._sequences.clear()
        self._leaving.clear()
        self._under_way.clear()
        self._open = None
        self._make_pools()
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
        report = self._reports.get(request if isinstance(request, str) else request.request_id)
        if report is None and not isinstance(request, str):
            report = self._reports.new(request, self.lookup(request))
        return report

    def live_sequences(self) -> Iterable[Sequence]:
        """Everything that holds pages, requests that were aborted during a step included."""
        yield from self._sequences.values()
        yield from self._leaving

    def steps(self) -> Iterable[StepRecord]:
        """The steps under way, the oldest first, and the one being put together."""
        yield from self._under_way.values()
        if self._open is not None:
            yield self._open

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

    def _is_current(self, hit: Hit) -> bool:
        """What the hit needs is still there."""
        node = hit.node
        if node is None:
            return True
        return self.index.nodes.get(node.hash) is node and node.slot is not None

    def _shortage(self, hit: Hit, num_tokens: int) -> NoSpace | None:
        """What is missing to admit a request with this hit and so many new tokens."""
        length, size = hit.num_tokens, self.settings.page_size
        pages = self.settings.pages_for(length + num_tokens) - length // size
        slots = 1
        if hit.node is not None:  # its idle items will not be available any more
            pages += sum(map(self.pages.is_idle, self.index.path_pages(hit.node)))
            slots += self.slots.is_idle(hit.node.slot or 0)
        pages -= self.pages.available
        slots -= self.snapshots.available_slots()
        if pages > 0 or slots > 0:
            return NoSpace(max(0, pages), max(0, slots))
        return None

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

    # Results.

    def _settle(self, sequence: Sequence, row: Row, result: RowResult | None) -> None:
        """Takes in a row that came back finite, or of which nothing is known any more."""
        if result is None or not result.finite:
            for snapshot in row.snapshots:
                self.snapshots.drop(snapshot, quarantine=result is not None)
            return
        if not sequence.gone:
            if row.kind is Pass.VERIFY:
                sequence.verify_start = sequence.num_computed
            sequence.num_computed += result.num_computed
            sequence.num_scheduled -= row.num_tokens - result.num_computed
            sequence.proven = sequence.proven or row.num_tokens > 0
            self._publish(sequence)
        self.snapshots.settle(row)

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

    def _quarantine(self, sequence: Sequence, row: Row) -> None:
        """Takes everything a non-finite row wrote out of the index, to be zeroed (C-13).

        If no row was finite since the request resumed, what it resumed from is suspect as well.
        """
        self.stats.nonfinite_rows += 1
        self._cancel(sequence)
        first = sequence.num_hit // self.settings.page_size if sequence.proven else 0
        suspect = list(sequence.pages[first:])
        source = sequence.source
        if source is not None and source.alive and not sequence.proven:
            suspect += source.pages
        for page in suspect:
            for node in list(self.index.on_page(page)):
                self.index.drop(node, "not finite", quarantine=True)
            if self.pages.references(page):
                self.pages.quarantine(page)
        self.slots.quarantine(sequence.slot)
        for snapshot in [s for r in [row, *sequence.rows] for s in r.snapshots]:
            self.snapshots.drop(snapshot, quarantine=True)
        if sequence.tail is not None:
            self.snapshots.drop(sequence.tail, quarantine=True)
            sequence.tail = None
        for other in self.live_sequences():
            resumed = other.source
            if (resumed is not None and resumed.poisoned) or any(
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
            self.snapshots.drop(snapshot)

    def _release(self, sequence: Sequence) -> None:
        """Gives back all that a request holds, exactly once (S-3), its last pages first."""
        if sequence.gone:
            raise RuntimeError(f"request {sequence.request_id} has been released")
        sequence.gone = True
        if sequence.leaving:
            self._leaving.remove(sequence)
        else:
            del self._sequences[sequence.request_id]
        self.snapshots.drop_tail(sequence)
        self.slots.release(sequence.slot)
        for page in reversed(sequence.pages):
            self.pages.release(page)
        if sequence.has_duplicates and sequence.tip is not None and sequence.tip.alive:
            self.index.touch(sequence.tip)

    def _raise_priority(self, node: Node | None, priority: int) -> None:
        while node is not None:
            self.index.raise_priority(node, priority)
            node = node.parent
