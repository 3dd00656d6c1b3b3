"""States on their way from a running slot into the index, and the slots they take."""

from collections.abc import Iterable, Mapping

from k3jax.cache.hashing import HashChain
from k3jax.cache.index import Index, Node
from k3jax.cache.pages import Pool
from k3jax.cache.report import CacheStats
from k3jax.cache.retention import Checkpoint, Kind, Pins
from k3jax.cache.sequence import Fence, Row, Sequence, Snapshot, StepRecord
from k3jax.cache.settings import CacheSettings
from k3jax.cache.step import Export, Pass, SlotCopy


class Snapshots:
    """Plans where states are written, publishes them when verified, keeps one aside for each
    running request, and hands out slots.

    Never a snapshot without a writer (C-14); a published one is never written again (C-3).
    """

    def __init__(
        self,
        settings: CacheSettings,
        index: Index,
        pins: Pins,
        stats: CacheStats,
        sequences: Mapping[str, Sequence],
    ):
        self.settings = settings
        self.index = index
        self.slots: Pool = index.slots
        self.pins = pins
        self.stats = stats
        self._sequences = sequences

    # Slots.

    def available_slots(self) -> int:
        """Slots for requests that must have one; where they are few, states aside count too."""
        available = self.slots.available
        return available if available > 1 else available + len(self._to_steal())

    def take_running_slot(self) -> int | None:
        """A slot to run in: evicts the least valuable idle state for it, or else takes the slot of
        a state that a running request keeps aside."""
        if not self.slots.num_free and not self.index.evict_slot():
            aside = self._to_steal()
            if not aside:
                return None
            aside[0].sequence.tail = None
            self.drop(aside[0], "its slot went to a new request")
        return self.slots.take()

    def _to_steal(self) -> list[Snapshot]:
        tails = (sequence.tail for sequence in self._sequences.values())
        return [tail for tail in tails if tail is not None and tail.fence is not Fence.PLANNED]

    # Planning.

    def pending(self, steps: Iterable[StepRecord], chain: HashChain, limit: int) -> int:
        """The longest boundary of this chain that steps under way are about to publish."""
        hashes, longest = chain.hashes, 0
        for step in steps:
            for row in step.rows.values():
                for snapshot in row.snapshots:
                    position, writer = snapshot.position, row.sequence
                    if (
                        snapshot.fence in (Fence.PLANNED, Fence.WRITTEN)
                        and snapshot.keep
                        and writer.publishable
                        and longest < position <= limit
                    ):
                        at = position // self.settings.match_unit - 1
                        if hashes[at] == writer.request.chain.hashes[at]:
                            longest = position
        return longest

    def copy_due(self, sequence: Sequence, row: Row) -> None:
        """Plans copies of the running slot at checkpoints it stands at, before the row runs."""
        for checkpoint in sequence.due():
            sequence.last_checkpoint = checkpoint.position
            snapshot = self._plan(sequence, row, checkpoint)
            if snapshot is not None:
                copy = SlotCopy(sequence.slot, snapshot.slot, checkpoint.position)
                row.slot_copies.append(copy)

    def export(self, sequence: Sequence, row: Row) -> None:
        """Plans the states that a prefill exports. A checkpoint at its end that is not among them
        is copied before the next row; one inside that cannot be exported is given up (C-14)."""
        end = row.start + row.num_tokens
        after = max(row.start, sequence.last_checkpoint)
        for checkpoint in sequence.retention.between(after, end, decode_end=False):
            position = checkpoint.position
            if len(row.exports) < self.settings.exports_per_segment and (
                position % self.settings.kda_chunk == 0 or position == end
            ):
                snapshot = self._plan(sequence, row, checkpoint)
                if snapshot is not None:
                    row.exports.append(Export(position, snapshot.slot))
            elif position < end:
                self._skip(sequence, checkpoint, "the pass could not write a state there")
            else:
                break
            sequence.last_checkpoint = position

    def _plan(self, sequence: Sequence, row: Row, checkpoint: Checkpoint) -> Snapshot | None:
        """A slot for a state that this row writes; None where it is stored already or none is free.

        The state kept aside for the end of the answer replaces the one before it in place: its
        tokens are known to be final, so that the older one is not needed any more.
        """
        if not sequence.publishable:
            return None
        node = self.index.at(sequence.request.chain, checkpoint.position)
        if node is not None and node.slot is not None:
            self._skip(sequence, checkpoint, "stored already")
            self.pin(sequence, node, checkpoint.position)
            return None
        aside = checkpoint.kind is Kind.DECODE_END
        if aside and sequence.tail is not None:
            slot = sequence.tail.slot
            sequence.tail.fence = Fence.DROPPED
        elif self.slots.num_free or self.index.evict_slot(priority=sequence.request.priority):
            slot = self.slots.take()
        else:
            self._skip(sequence, checkpoint, "no slot was free")
            return None
        snapshot = Snapshot(sequence, checkpoint, slot, keep=not aside)
        row.snapshots.append(snapshot)
        if aside:
            sequence.tail = snapshot
        else:
            sequence.report.note(checkpoint.position, checkpoint.kind.value, "planned")
        return snapshot

    # Publishing.

    def settle(self, row: Row) -> None:
        """The row came back finite: publishes its states, or knows that the one aside is good."""
        for snapshot in row.snapshots:
            if snapshot.fence is Fence.WRITTEN:
                if snapshot is row.sequence.tail:
                    snapshot.fence = Fence.VERIFIED
                else:
                    self._publish(snapshot)

    def keep_latest(self, sequence: Sequence, *, running: bool = True) -> None:
        """Publishes the latest state that is exactly at a boundary of final tokens (C-12).

        The running slot itself, if `running` and it stands at one and nothing is under way; else
        the state kept aside, now or when its step is committed.
        """
        here = sequence.num_computed
        if (
            running
            and not sequence.rows
            and sequence.last_kind is not Pass.VERIFY
            and sequence.num_hit < here == sequence.num_final
            and here % self.settings.match_unit == 0
            and sequence.publishable
        ):
            node = self.index.at(sequence.request.chain, here)
            if node is not None and self.index.add_state(node, sequence.slot):
                self._note_stored(sequence, node, Kind.DECODE_END)
                return
        tail = sequence.tail
        if tail is not None:
            sequence.tail = None
            tail.keep = True
            if tail.fence is Fence.VERIFIED:
                self._publish(tail)

    def drop(self, snapshot: Snapshot, reason: str = "", *, quarantine: bool = False) -> None:
        """Gives up a state on its way, and its slot."""
        if snapshot.fence in (Fence.DROPPED, Fence.PUBLISHED):
            return
        snapshot.fence = Fence.DROPPED
        if quarantine:
            self.slots.quarantine(snapshot.slot)
        self.slots.release(snapshot.slot)
        if reason:
            self._skip(snapshot.sequence, snapshot.checkpoint, reason)

    def drop_tail(self, sequence: Sequence) -> None:
        """Gives up the state kept aside."""
        if sequence.tail is not None:
            self.drop(sequence.tail)
            sequence.tail = None

    def _publish(self, snapshot: Snapshot) -> None:
        """Publishes a verified state where its prefix is published (C-11, C-15), else drops it."""
        sequence, position = snapshot.sequence, snapshot.position
        node = None
        if sequence.publishable and snapshot.keep and position <= sequence.num_final:
            node = self.index.at(sequence.request.chain, position)
        if node is None:
            self.drop(snapshot, "its prefix is not in the index")
        elif not self.index.add_state(node, snapshot.slot):
            self.drop(snapshot, "stored already")
        else:
            snapshot.fence = Fence.PUBLISHED
            self.slots.release(snapshot.slot)
            self._note_stored(sequence, node, snapshot.checkpoint.kind)
            if sequence.tail is not None and sequence.tail.position <= position:
                self.drop_tail(sequence)

    def _note_stored(self, sequence: Sequence, node: Node, kind: Kind) -> None:
        self.stats.snapshots[kind.value] += 1
        sequence.report.note(node.num_tokens, kind.value, "stored")
        self.pin(sequence, node, node.num_tokens)

    def _skip(self, sequence: Sequence, checkpoint: Checkpoint, reason: str) -> None:
        self.stats.skipped_snapshots[reason] += 1
        sequence.report.note(checkpoint.position, checkpoint.kind.value, reason)

    # Pins.

    def pin(self, sequence: Sequence, node: Node, position: int) -> None:
        """Pins a stored prefix if the request asks for that at this position."""
        ttl = sequence.request.pin_ttl_s
        if ttl is not None and position in self._positions_to_pin(sequence):
            sequence.report.pinned = self.pins.pin(node, self.index.path_pages(node), ttl)
            self.stats.pins_refused += not sequence.report.pinned

    def renew_pins(self, sequence: Sequence) -> None:
        """Pins again what is stored already of the positions that the request asks for, and held:
        an admission leaves the room that was counted for it."""
        for position in self._positions_to_pin(sequence):
            if position <= sequence.num_hit:
                node = self.index.at(sequence.request.chain, position)
                if node is not None and node.slot is not None:
                    pages = self.index.path_pages(node)
                    if all(map(self.index.pages.references, pages)):
                        self.pin(sequence, node, position)

    def _positions_to_pin(self, sequence: Sequence) -> list[int]:
        """Where the client directs, else the end of the prompt."""
        if sequence.request.pin_ttl_s is None:
            return []
        kind = Kind.DIRECTED if sequence.request.checkpoints else Kind.PROMPT_END
        return [c.position for c in sequence.retention.fixed if c.kind is kind]
