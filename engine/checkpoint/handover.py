"""Sealed saves, from the hand-over to the writer until its last word on each of them.

Knows which saves are unsettled and which images they still need, replaces a dead writer and hands
it what its predecessor left. Training thread only, no torch, nothing collective. Waits for the disk
only in `wait_for_image` and `settle`.

In the local tier an image is free when its rank has the shard on its node's own disk. Such a save
is unsettled until it is in the shared directory too, and there are never many: see BACKLOG.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.writer_link import Seal, WriterLink, WriterStartError
from engine.format.names import SaveId, step_of

logger = logging.getLogger(__name__)

Event = dict[str, Any]

IMAGES = 2  # a death in the middle of a copy never touches the last whole one
BACKLOG = 2
"""Saves in the local tier alone that do not keep another one from being staged: one is on its way
to the shared directory, and the next waits so that this never pauses. More would not make it
faster; each is one more step back, by a whole cadence, when a node is lost with its disk.
"""
_MAX_WRITER_DEATHS = 3


@dataclass
class _Unsettled:
    """A sealed save whose end the writer has not reported yet.

    `is_shared` says that this rank's shard is in the shared directory. A save that an earlier
    attempt left in the local tier has no image.
    """

    seal: Seal
    image: int | None
    descriptor: int | None
    holds_image: bool = True
    is_shared: bool = False
    writer_deaths: int = 0


class Handover:
    """Unsettled saves of one rank, and its writer."""

    def __init__(
        self,
        link: WriterLink,
        rank: int,
        on_event: Callable[[Event], None],
        on_progress: Callable[[UnderWay], None] | None = None,
    ) -> None:
        self._link = link
        self._rank = rank
        self._on_event = on_event
        self._on_progress = on_progress
        self._unsettled: dict[str, _Unsettled] = {}
        self._writer_missing = False
        self.failures_in_a_row = 0
        self.last_failure = ""
        self.last_committed_step: int | None = None
        self.fenced = False
        self.beats_lost = 0
        self.local_failures = 0

    @property
    def held_images(self) -> set[int]:
        """Numbers of the images that the writer has not persisted yet: they must not change."""
        held = (save.image for save in self._unsettled.values() if save.holds_image)
        return {image for image in held if image is not None}

    @property
    def busy(self) -> str:
        """Why no save can be staged now, or nothing where one can."""
        if len(self.held_images) == IMAGES:
            return "both images are still being written"
        local = sum(not save.is_shared for save in self._unsettled.values())
        if local > BACKLOG:
            return f"{local} saves are still on their way from local_dir to the shared directory"
        return ""

    def hand_over(self, seal: Seal, image: int, descriptor: int) -> None:
        """Seal image number `image`, which `descriptor` leads to. With this it is fully staged.

        Raises OSError where this process cannot (no descriptors left): then it is not.
        """
        self._unsettled[seal.save_id] = _Unsettled(seal, image, descriptor)
        try:
            self._link.seal(seal, descriptor)  # to a dead writer: its successor is handed it again
        except OSError:
            del self._unsettled[seal.save_id]
            raise

    def hand_over_local(self, seal: Seal) -> None:
        """Have a save that an earlier attempt left in the local tier put into the shared directory.

        `seal` holds the digest of this rank's file.
        """
        self._unsettled[seal.save_id] = _Unsettled(seal, None, None, holds_image=False)
        self._link.seal(seal, None)

    def wait_for_image(self, timeout_seconds: float) -> None:
        """Block until an image is free and may be filled. CheckpointError where none is in time."""
        self._wait(lambda: not self.busy, timeout_seconds, self.busy)

    def take_in(self) -> None:
        """Take in the writer's reports; replace a writer that has died or hangs. Does not wait."""
        for report in self._link.reports():
            self._handle(report)
        if self._unsettled and self._link.silent:
            self._link.kill()
            self._restart_writer("it said nothing for too long: it was stopped, or hung; killed")
        elif not self._link.alive and (self._unsettled or not self._writer_missing):
            self._restart_writer("it has died")
        if self._on_progress is not None:
            for one in self._link.under_way:
                if one.save_id in self._unsettled:
                    self._on_progress(one)

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

    def _restart_writer(self, why: str) -> None:
        """Replace a dead writer and give the new one what is not settled.

        Without the image where that was persisted: it may hold another save by now.
        """
        logger.error("rank %d: a new writer for process %s: %s", self._rank, self._link.pid, why)
        try:
            self._link.start()
            reason = f"the writer was lost {_MAX_WRITER_DEATHS} times over it"
        except (WriterStartError, OSError) as error:
            reason = why = f"no writer could be started: {error}"
        self._writer_missing = not self._link.alive
        handed_over = []
        for save_id, save in list(self._unsettled.items()):
            save.writer_deaths += 1
            if save.writer_deaths >= _MAX_WRITER_DEATHS or not self._link.alive:
                self._handle({"kind": "failed", "save_id": save_id, "reason": reason})
            elif self._link.seal(
                save.seal, save.descriptor if save.holds_image else None, again=True
            ):
                handed_over.append(save_id)
        kind = "writer_missing" if self._writer_missing else "writer_restarted"
        self._emit(kind, {"pid": self._link.pid, "saves": handed_over, "reason": why})

    def _handle(self, report: dict[str, Any]) -> None:
        kind = report.pop("kind")
        if "save_id" not in report:
            self._handle_of_attempt(kind, report)
            return
        save_id = str(report.pop("save_id"))
        tag = SaveId.parse(save_id).tag
        event = {"tag": tag, "step": step_of(tag), "save_id": save_id, **report}
        save = self._unsettled.get(save_id)
        if kind == "persisted":
            if save is not None:
                save.holds_image, save.is_shared = False, True
                if self._rank != 0:  # only rank 0's writer sees it commit
                    del self._unsettled[save_id]
                    self.failures_in_a_row = 0
            self._emit(kind, event)
        elif kind == "persisted_locally":
            if save is not None:
                save.holds_image = False
            self._emit(kind, event)
        elif kind == "local_failed":
            self.local_failures += 1
            logger.error("rank %d: %s in the local tier: %s", self._rank, tag, event["reason"])
            self._emit(kind, {**event, "count": self.local_failures})
        elif kind in ("failed", "abandoned", "fenced"):
            if self._unsettled.pop(save_id, None) is not None:
                self._failed(kind, event)
            self.fenced = self.fenced or kind == "fenced"
        elif kind == "committed":
            self._unsettled.pop(save_id, None)
            self.failures_in_a_row = 0
            self.last_committed_step = step_of(tag)
            self._emit(kind, event)
        else:  # pruned, untidy, committed_locally: for the record
            self._emit(kind, event)

    def _handle_of_attempt(self, kind: str, event: Event) -> None:
        """Take in what rank 0's writer has to say of the attempt as a whole, by its beat."""
        if kind == "beat_lost":
            self.beats_lost += 1
            event["count"] = self.beats_lost
        self.fenced = self.fenced or kind == "fenced"
        level = logging.INFO if kind == "beat_restored" else logging.ERROR
        logger.log(level, "rank %d: %s: %s", self._rank, kind, event["reason"])
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
