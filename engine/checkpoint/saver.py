"""One rank's saves, from the live engine to its writer's last report.

`Saver` owns the rank's images and its writer, and knows which saves are unsettled. It waits for the
disk only where both images are still being written. Training thread only; nothing here is
collective: `engine.checkpointer` agrees with the other ranks between the steps.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.staging import IMAGES, StagingArea
from engine.checkpoint.writer_link import Seal, WriterLink, WriterStartError
from engine.checkpoint.zero3 import Layout, LiveState, Source, dtype_name
from engine.format.layout import entries_of
from engine.format.names import SaveId, save_directory, step_of
from engine.format.shard import Entry, metadata_of

logger = logging.getLogger(__name__)

Event = dict[str, Any]

_MAX_WRITER_DEATHS = 3


@dataclass
class _Unsettled:
    """A sealed save whose end the writer has not reported yet."""

    seal: Seal
    image: int
    descriptor: int
    holds_image: bool = True
    writer_deaths: int = 0


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


class Saver:
    """Images, writer and unsettled saves of one rank."""

    def __init__(
        self, link: WriterLink, rank: int, world_size: int, on_event: Callable[[Event], None]
    ) -> None:
        self._link = link
        self._rank = rank
        self._world_size = world_size
        self._on_event = on_event
        self._area = StagingArea()
        self._unsettled: dict[str, _Unsettled] = {}
        self.failures_in_a_row = 0
        self.last_failure = ""
        self.last_committed_step: int | None = None
        self.fenced = False

    def wait_for_image(self, timeout_seconds: float) -> None:
        """Block until an image is free. Raises CheckpointError when none is in time."""
        self._wait(
            lambda: sum(save.holds_image for save in self._unsettled.values()) < IMAGES,
            timeout_seconds,
            "both images are still being written",
        )

    def stage(self, save_id: SaveId, snapshot: Snapshot, timeout_seconds: float) -> None:
        """Copy `snapshot` into a free image. Blocks for one memory copy.

        A changed plan (the optimizer's state after the first step) takes new images, for which the
        old ones must be written first: that blocks for at most `timeout_seconds`.
        """
        if self._area.needs_new_plan(snapshot.entries):
            self._wait(
                lambda: not any(save.holds_image for save in self._unsettled.values()),
                timeout_seconds,
                "the images of another plan are still being written",
            )
        plan = self._area.plan(snapshot.entries)
        header = plan.header_bytes(metadata_of(str(save_id), self._rank, self._world_size))
        held = {save.image for save in self._unsettled.values() if save.holds_image}
        index = next(i for i in range(IMAGES) if i not in held)
        image = self._area.stage(index, header, snapshot.sources)
        seal = Seal(
            save=save_directory(save_id.tag, save_id.save_counter),
            save_id=str(save_id),
            size_bytes=plan.size_bytes,
            data_offset=plan.data_offset,
            draft=None,
        )
        self._unsettled[str(save_id)] = _Unsettled(seal, index, image.descriptor)

    def seal(self, save_id: SaveId, draft: bytes | None) -> int:
        """Hand the staged image to the writer; return its bytes. With this it is fully staged."""
        save = self._unsettled[str(save_id)]
        save.seal = Seal(**{**vars(save.seal), "draft": draft})
        self._link.seal(save.seal, save.descriptor)
        return save.seal.size_bytes

    def forget(self, save_id: SaveId) -> None:
        """Give back an image that was staged and will not be sealed."""
        self._unsettled.pop(str(save_id), None)

    def take_in(self) -> None:
        """Take in the writer's reports; start another writer if it has died. Does not wait."""
        for report in self._link.reports():
            self._handle(report)
        if not self._link.alive:
            self._restart_writer()

    def settle(self, timeout_seconds: float) -> bool:
        """Block until every sealed save is settled; False if the time ran out."""
        try:
            self._wait(lambda: not self._unsettled, timeout_seconds, "saves are unsettled")
        except CheckpointError as error:
            logger.error("%s", error)
            return False
        return True

    def fail(self, tag: str, reason: str) -> None:
        """Count and report a save that came to nothing before it was sealed."""
        self._failed("skipped", {"tag": tag, "step": step_of(tag), "reason": reason})

    def close(self) -> None:
        """Let the writer go; it finishes what it has, and signs off."""
        self._link.close()
        self._area.close()

    def _wait(self, ready: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        self.take_in()
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0:
                raise CheckpointError(
                    f"rank {self._rank}: {what} after {timeout_seconds:g} s; the disk is slower "
                    "than checkpoint.commit_deadline_seconds allows"
                )
            self._link.wait(min(left, 1.0))
            self.take_in()

    def _restart_writer(self) -> None:
        """Replace a dead writer and give it what is not settled; seals are idempotent."""
        logger.error("rank %d: the writer (process %s) has died", self._rank, self._link.pid)
        try:
            self._link.start()
            reason = f"the writer died {_MAX_WRITER_DEATHS} times over it"
        except WriterStartError as error:
            reason = str(error)
        for save_id, save in list(self._unsettled.items()):
            save.writer_deaths += 1
            if save.writer_deaths >= _MAX_WRITER_DEATHS or not self._link.alive:
                self._handle({"kind": "failed", "save_id": save_id, "reason": reason})
            else:
                self._link.seal(save.seal, save.descriptor)
        self._emit("writer_restarted", {})

    def _handle(self, report: dict[str, Any]) -> None:
        kind = report.pop("kind")
        save_id = str(report.pop("save_id"))
        tag = SaveId.parse(save_id).tag
        event = {"tag": tag, "step": step_of(tag), **report}
        save = self._unsettled.get(save_id)
        if kind == "persisted":
            if save is not None:
                save.holds_image = False
                if self._rank != 0:
                    del self._unsettled[save_id]  # only rank 0's writer sees it commit
            self._emit(kind, event)
        elif kind in ("failed", "abandoned", "fenced"):
            # Rank 0's writer follows its own failure by abandoning the save: count it once.
            if self._unsettled.pop(save_id, None) is not None:
                self._failed(kind, event)
            self.fenced = self.fenced or kind == "fenced"
        elif kind == "committed":
            self._unsettled.pop(save_id, None)
            self.failures_in_a_row = 0
            self.last_committed_step = step_of(tag)
            self._emit(kind, event)
        else:  # pruned, untidy: for the record
            self._emit(kind, event)

    def _failed(self, kind: str, event: Event) -> None:
        self.failures_in_a_row += 1
        self.last_failure = str(event.get("reason", kind))
        logger.error(
            "rank %d: save of %s %s: %s", self._rank, event["tag"], kind, self.last_failure
        )
        self._emit(kind, event)

    def _emit(self, kind: str, fields: Event) -> None:
        self._on_event({"event": kind, "rank": self._rank, **fields})
