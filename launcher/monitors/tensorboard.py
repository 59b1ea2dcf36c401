"""TensorBoard's event files, one for each attempt, which together are one curve.

Written here, and not by torch's SummaryWriter, for two reasons. TensorBoard reads the files of a
directory in the order of their names, and there the name begins with the time of the host: after a
requeue to a host whose clock is behind, the later attempt would be read first. And its writer is a
thread that keeps an error of the disk to itself.
"""

import re
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from launcher.monitors import settings
from launcher.monitors.point import Point

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoard:
    """A monitor; see `launcher.monitors.point`."""

    name = settings.TENSORBOARD

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def open(self) -> None:
        """Begin a file whose name comes after all that are there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        found = (_NAME.match(path.name) for path in self.directory.iterdir())
        number = 1 + max((int(match[1]) for match in found if match is not None), default=-1)
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}"
        self._file = (self.directory / name).open("xb")
        self._writer = RecordWriter(self._file)
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def go_back(self, step: int) -> None:
        """Begin a session: readers drop the points from its first step on."""
        started = SessionLog(status=SessionLog.START)
        self._put(Event(wall_time=time.time(), step=step + 1, session_log=started))

    def write(self, point: Point) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in point.figures.items()
        ]
        self._put(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))

    def flush(self) -> None:
        assert self._file is not None
        self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
