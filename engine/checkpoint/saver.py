"""One rank's saves, from the live engine to its writer's last report.

`Saver` owns the rank's images: it plans them, has the live state copied in, and seals them when the
copy is complete. What becomes of a sealed save is `Handover`'s. Training thread only; nothing here
is collective: `engine.checkpointer` agrees with the other ranks between the steps.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.checkpoint.copier import Copier
from engine.checkpoint.handover import IMAGES, Event, Handover
from engine.checkpoint.plan import StagingPlan, Structure
from engine.checkpoint.snapshot import Snapshot
from engine.checkpoint.staging import StagingArea
from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.checkpoint.zero3 import Layout
from engine.format.layout import entries_of_manifest, weight_spans
from engine.format.manifest import Manifest
from engine.format.names import SaveId, save_directory, step_of
from engine.format.shard import ShardPlan, metadata_of

_NO_SAVE = 0  # the save counter of an attempt's own saves begins at 1


@dataclass(frozen=True)
class _Staged:
    """An image that is not sealed yet; perhaps it is still being copied to."""

    seal: Seal
    tag: str
    image: int
    descriptor: int
    pause_seconds: float = 0.0


class Saver(Handover):
    """Images, writer and unsettled saves of one rank."""

    def __init__(
        self,
        link: WriterLink,
        rank: int,
        layout: Layout,
        copier: Copier,
        on_event: Callable[[Event], None],
        on_progress: Callable[[UnderWay], None] | None = None,
    ) -> None:
        super().__init__(link, rank, on_event, on_progress)
        self._layout = layout
        self._copier = copier
        self._area = StagingArea(layout, copier)
        self._staged: _Staged | None = None
        self._agreed: _Staged | None = None
        self.persist_seconds: float | None = None
        """How long the writer took for its last shard."""

    def size_ahead(self, structure: Structure, state_keys: Sequence[str]) -> int:
        """Plan ahead of the first save; return the bytes of a shard that has `state_keys`, too."""
        plan = self._area.plan(structure)
        ahead = self._area.plan(structure.with_state(state_keys))
        return max(plan.shard.size_bytes, ahead.shard.size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Make images for shards of `size_bytes`."""
        self._area.reserve(size_bytes)

    def plan(self, structure: Structure, timeout_seconds: float) -> StagingPlan:
        """Return the plan for `structure`.

        A state that has outgrown its images takes new ones, for which the old ones must be written
        first: that blocks for at most `timeout_seconds`, and then raises CheckpointError.
        """
        plan = self._area.plan(structure)
        if plan.shard.size_bytes > self._area.size_bytes:
            self._wait(
                lambda: not self.held_images,
                timeout_seconds,
                "the images of a smaller state are still being written",
            )
            self._area.reserve(plan.shard.size_bytes)
        return plan

    def stage(self, save_id: SaveId, plan: StagingPlan, snapshot: Snapshot) -> None:
        """Copy the state into a free image, or begin to. Blocks for one memory copy at most."""
        metadata = metadata_of(str(save_id), self._layout.rank, self._layout.world_size)
        header = plan.shard.header_bytes(metadata)
        index = next(i for i in range(IMAGES) if i not in self.held_images)
        image = self._area.stage(index, plan, header, snapshot.tensors)
        seal = Seal(
            save=save_directory(save_id.tag, save_id.save_counter),
            save_id=str(save_id),
            size_bytes=plan.shard.size_bytes,
            data_offset=plan.shard.data_offset,
            weights=plan.weights,
            draft=None,
        )
        self._staged = _Staged(seal, save_id.tag, index, image.descriptor)

    def seal(self, draft: bytes | None, pause_seconds: float) -> None:
        """Seal the staged image: at once, or in `finish_copy` where the copy still goes on.

        Where this is never called, the next `stage` takes the image again.
        """
        assert self._staged is not None, "stage() comes first"
        staged, self._staged = self._staged, None
        seal = replace(staged.seal, draft=draft)
        self._agreed = replace(staged, seal=seal, pause_seconds=pause_seconds)
        if not self._copier.overlaps:
            self.finish_copy()

    def drain(self, manifest: Manifest) -> None:
        """Have a save that an earlier attempt left in the local tier put into the shared directory.

        With this attempt's own saves, ahead of all of them; as that attempt's, by its save id.
        """
        rank = self._layout.rank
        shard = manifest.shards[rank]
        self.hand_over_local(
            Seal(
                save=save_directory(manifest.tag, _NO_SAVE),
                save_id=manifest.save_id,
                size_bytes=shard.size_bytes,
                data_offset=shard.data_offset,
                weights=weight_spans(ShardPlan(entries_of_manifest(manifest, rank))),
                draft=json.dumps(manifest.draft_json()).encode() if self._rank == 0 else None,
                digest=shard.digest,
            )
        )

    def finish_copy(self) -> None:
        """Wait for the copy under way, if there is one, and seal it: now it is fully staged.

        Must be called before the parameters change: DeepSpeed does, through the checkpoint engine.
        """
        self._copier.finish()
        if self._agreed is None:
            return
        staged, self._agreed = self._agreed, None
        try:
            self.hand_over(staged.seal, staged.image, staged.descriptor)
        except OSError as error:  # not to be raised: DeepSpeed's step may be what called
            self.fail(staged.tag, f"could not be handed to the writer: {error}")
            return
        fields = {
            "tag": staged.tag,
            "step": step_of(staged.tag),
            "bytes": staged.seal.size_bytes,
            "seconds": staged.pause_seconds,
        }
        self._emit("staged", fields)

    def settle(self, timeout_seconds: float) -> bool:
        """Block until every staged save is settled; False if the time ran out."""
        self.finish_copy()
        return super().settle(timeout_seconds)

    def close(self, patience_seconds: float = 0.0) -> None:
        """Let the writer go; it finishes what it has, and signs off.

        Blocks until it has, for at most `patience_seconds`.
        """
        self.finish_copy()
        self.take_in()  # a writer that has died is replaced: somebody has to close the attempt
        self._link.close(patience_seconds)
        self._area.close()

    def _emit(self, kind: str, fields: Event) -> None:
        if kind == "persisted" and fields["seconds"] > 0:  # 0: a new writer found it there
            self.persist_seconds = fields["seconds"]
        super()._emit(kind, fields)
