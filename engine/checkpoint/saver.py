"""One rank's saves, from the live engine to its writer's last report.

`Saver` owns the rank's images: it plans them, and copies the live state in. What becomes of a
sealed save is `Handover`'s. Training thread only; nothing here is collective: `engine.checkpointer`
agrees with the other ranks between the steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from engine.checkpoint.handover import IMAGES, Event, Handover
from engine.checkpoint.staging import StagingArea
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.checkpoint.zero3 import Layout, LiveState, Source, dtype_name
from engine.format.layout import entries_of
from engine.format.names import SaveId, save_directory
from engine.format.shard import Entry, metadata_of


@dataclass(frozen=True)
class _Staged:
    """A whole image that is not sealed yet."""

    seal: Seal
    image: int
    descriptor: int


@dataclass(frozen=True)
class Snapshot:
    """References to everything that a rank's shard is to hold, and the entries it makes."""

    sources: Mapping[str, Source]
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, layout: Layout, live: LiveState, whole: Mapping[str, torch.Tensor]) -> "Snapshot":
        """Join the slices of `live` and the `whole` tensors (buffers, RNG) of one rank."""
        sources = dict(live.sources)
        for name, tensor in whole.items():
            sources[name] = Source(tensor.reshape(-1), 0, tensor.numel())
        entries = entries_of(
            layout.parameters,
            live.optimizer.state_keys,
            whole_entries(whole),
            layout.world_size,
            layout.rank,
        )
        return cls(sources, tuple(entries))


def whole_entries(whole: Mapping[str, torch.Tensor]) -> tuple[Entry, ...]:
    """Return the entries of tensors that every rank stores whole."""
    return tuple(Entry(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in whole.items())


class Saver(Handover):
    """Images, writer and unsettled saves of one rank."""

    def __init__(
        self, link: WriterLink, rank: int, world_size: int, on_event: Callable[[Event], None]
    ) -> None:
        super().__init__(link, rank, on_event)
        self._world_size = world_size
        self._area = StagingArea()
        self._staged: _Staged | None = None

    def stage(self, save_id: SaveId, snapshot: Snapshot, timeout_seconds: float) -> None:
        """Copy `snapshot` into a free image. Blocks for one memory copy.

        A changed plan (the optimizer's state after the first step) takes new images, for which the
        old ones must be written first: that blocks for at most `timeout_seconds`.
        """
        if self._area.needs_new_plan(snapshot.entries):
            self._wait(
                lambda: not self.held_images,
                timeout_seconds,
                "the images of another plan are still being written",
            )
        plan = self._area.plan(snapshot.entries)
        header = plan.header_bytes(metadata_of(str(save_id), self._rank, self._world_size))
        index = next(i for i in range(IMAGES) if i not in self.held_images)
        image = self._area.stage(index, header, snapshot.sources)
        seal = Seal(
            save=save_directory(save_id.tag, save_id.save_counter),
            save_id=str(save_id),
            size_bytes=plan.size_bytes,
            data_offset=plan.data_offset,
            draft=None,
        )
        self._staged = _Staged(seal, index, image.descriptor)

    def seal(self, draft: bytes | None) -> int:
        """Hand the staged image to the writer; return its bytes. With this it is fully staged.

        Where this is never called, the next `stage` takes the image again.
        """
        assert self._staged is not None, "stage() comes first"
        staged, self._staged = self._staged, None
        self.hand_over(replace(staged.seal, draft=draft), staged.image, staged.descriptor)
        return staged.seal.size_bytes

    def close(self) -> None:
        """Let the writer go; it finishes what it has, and signs off."""
        self._link.close()
        self._area.close()
