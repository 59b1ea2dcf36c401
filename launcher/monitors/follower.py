"""Takes a run's metrics.jsonl into one monitor: every kept step once, whatever was killed.

The file is the truth, and a monitor a picture of it. How far the picture goes is written down
beside it, after it is durable against a kill: an attempt begins there, with what the one before it
recorded but could not show any more, and has the monitor forget what is taken back. A monitor that
is switched on in the middle of a run thus shows the run from its first step, and one that failed
goes on where it was.

One thread at a time may call a follower. It works in slices of a few milliseconds, so that the
training thread, which needs the interpreter again and again, does not have to wait for it long.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.monitors.point import Monitor, Point, point_of

_SLICE_BYTES = 16384  # some 70 steps
_MARK_NAME = "shown.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mark:
    """How far a monitor has come: `offset` bytes of metrics.jsonl, and `step` is the last shown."""

    offset: int
    step: int


class Follower:
    """Follows one attempt into one monitor.

    Args:
        metrics: metrics.jsonl; it need not be there yet.
        tokens_per_step: None where samples have no tokens.
        attempt: only its lines are taken, of those that are written from now on: an attempt that
            was taken over may still write.
        step: where it begins. What the lines before it say of later steps does not count.
    """

    def __init__(
        self,
        monitor: Monitor,
        metrics: Path,
        *,
        tokens_per_step: int | None,
        attempt: int | None,
        step: int,
    ) -> None:
        self.name = monitor.name
        self._monitor = monitor
        self._metrics = metrics
        self._tokens_per_step = tokens_per_step
        self._attempt = attempt
        self._begins_at = step
        self._earlier_bytes = _size_of(metrics)
        self._mark: Mark | None = None  # of what is durable; from the file at first
        self._is_open = False
        self._has_begun = False  # this attempt, as far as the monitor was shown it
        self._has_damaged_lines = False

    def catch_up(self) -> bool:
        """Show the next slice of what is recorded; tell whether there is more.

        Raises:
            Exception: the monitor's; `give_up` must follow, and the next call begins again.
        """
        mark = self._open()
        lines, more = _slice(self._metrics, mark.offset)
        offset, shown = mark.offset, mark.step
        for line in lines:
            is_earlier = offset < self._earlier_bytes
            offset += len(line)
            if not is_earlier:
                shown = self._begin(shown)
            point = self._counted(line, is_earlier)
            if point is None:
                continue
            if point.step <= shown:
                self._monitor.go_back(point.step - 1)
            self._monitor.write(point)
            shown = point.step
        if not more:
            shown = self._begin(shown)
        self._keep(Mark(offset, shown))
        return more

    def give_up(self) -> None:
        """End what is open. Never raises."""
        self._is_open = False
        try:
            self._monitor.close()
        except Exception as error:  # whatever it is, there is nothing left to do about it
            logger.debug("%s: while it was closed: %s", self.name, error)

    def _open(self) -> Mark:
        if self._mark is None:
            kept = _read_mark(self._monitor.directory / _MARK_NAME)
            # A shorter file is another one, which cannot have been shown.
            self._mark = Mark(min(kept.offset, self._earlier_bytes), kept.step)
        if not self._is_open:
            self._monitor.open()
            self._monitor.go_back(self._mark.step)
            self._has_begun = self._mark.offset > self._earlier_bytes
            self._is_open = True
        return self._mark

    def _begin(self, shown: int) -> int:
        """After the lines of earlier attempts: forget what this one takes back."""
        if not self._has_begun:
            self._has_begun = True
            if shown > self._begins_at:
                self._monitor.go_back(self._begins_at)
                return self._begins_at
        return shown

    def _counted(self, line: bytes, is_earlier: bool) -> Point | None:
        """Return what a line tells of, unless it is damaged or does not count."""
        found = point_of(line, self._tokens_per_step)
        if found is None:
            if line.strip() and not self._has_damaged_lines:
                self._has_damaged_lines = True
                logger.warning(
                    "%s: %s has damaged lines, which are not shown", self.name, self._metrics
                )
            return None
        attempt, point = found
        counts = point.step <= self._begins_at if is_earlier else attempt == self._attempt
        return point if counts else None

    def _keep(self, mark: Mark) -> None:
        if mark != self._mark:
            self._monitor.flush()
            path = self._monitor.directory / _MARK_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.part")
            temporary.write_text(json.dumps(asdict(mark)), encoding="ascii")
            os.replace(temporary, path)
        self._mark = mark


def _slice(path: Path, offset: int) -> tuple[Iterator[bytes], bool]:
    """Return whole lines from `offset` on, and whether there may be more of them."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_SLICE_BYTES)
            more = len(data) == _SLICE_BYTES
            if b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return iter(()), False
    end = data.rfind(b"\n") + 1
    return iter(data[:end].splitlines(keepends=True)), more and end > 0


def _read_mark(path: Path) -> Mark:
    """Return the mark that was kept; one that cannot be is the beginning, which shows all anew."""
    try:
        kept = json.loads(path.read_text(encoding="ascii"))
        mark = Mark(int(kept["offset"]), int(kept["step"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return Mark(0, 0)
    return mark if mark.offset >= 0 and mark.step >= 0 else Mark(0, 0)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
