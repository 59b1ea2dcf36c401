"""The files of a run directory that people and scripts read; rank 0 writes them.

Owns config.yaml, attempts.jsonl, metrics.jsonl, events.jsonl, rollbacks.jsonl (of
`launcher.guards`) and the place of the ranks' logs; docs/records.md has their fields. Nothing is
ever written over: lines are appended, and the first attempt's configuration is kept.
"""

import datetime
import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.protocol.files import fsync_directory

RECORDS_VERSION = 1
"""Of `docs/records.md`. Another one means something else by a field; what is only added is not."""

logger = logging.getLogger(__name__)


def now() -> str:
    """Return the time as every record has it: ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class JsonLines:
    """An append-only file of one JSON object per line, each visible as soon as it is written.

    Floats are written by `repr`, so that they can be compared bit by bit. A record that cannot be
    written (a full disk) is lost and counted, with one error in the log: records must not end a
    run whose checkpoints can still be saved once there is room.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._torn = False
        self.lost = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Never raises for the disk's sake."""
        try:
            self._write(record)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                logger.error("cannot write %s: %s; its records are lost", self.path, error)

    def append_durably(self, record: Mapping[str, Any]) -> None:
        """Write one line, and return when it would outlive a loss of power.

        Raises:
            OSError: the disk fails; whether the line is there is not known.
        """
        os.fsync(self._write(record))
        fsync_directory(str(self.path.parent))

    def read(self) -> list[dict[str, Any]]:
        """Return all records; a line that a killed attempt left unfinished is passed over.

        Raises:
            OSError: the file cannot be read; that there is none is no error.
            ValueError: a line has its end, and is damaged all the same.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        records = []
        for line in text.splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if line.endswith("}"):
                    raise ValueError(f"a damaged line: {line!r}") from error
        return records

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, record: Mapping[str, Any]) -> int:
        """Write one line and return the descriptor. Raises OSError."""
        line = json.dumps(record) + "\n"
        if self._descriptor is None:
            self._descriptor = self._open()
        # A line that was cut short is ended first, so as not to spoil this one.
        data = (("\n" if self._torn else "") + line).encode()
        written = os.write(self._descriptor, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._descriptor

    def _open(self) -> int:
        """Open for appending; find out whether the last line was left unfinished."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(descriptor).st_size
        self._torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        return descriptor


class RunDirectory:
    """Where one run keeps what it tells the world."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.attempts = JsonLines(self.path / "attempts.jsonl")
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.events = JsonLines(self.path / "events.jsonl")
        self.rollbacks = JsonLines(self.path / "rollbacks.jsonl")

    def keep_first_configuration(self, settings: Mapping[str, Any]) -> None:
        """Write config.yaml unless it is there."""
        from omegaconf import OmegaConf

        try:
            with open(self.path / "config.yaml", "x", encoding="utf-8") as file:
                file.write(OmegaConf.to_yaml(OmegaConf.create(dict(settings))))
        except FileExistsError:
            return

    def keep_settings(self, attempt: int, settings: Mapping[str, Any]) -> None:
        """Write what an attempt runs with, beside its logs."""
        path = self._of_attempt(attempt) / "settings.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def settings_before(self, attempt: int) -> dict[str, Any] | None:
        """Return what the newest attempt before this one ran with, if one left it."""
        for number in range(attempt - 1, -1, -1):
            try:
                text = (self._of_attempt(number) / "settings.json").read_text(encoding="utf-8")
                settings = json.loads(text)
            except (OSError, ValueError):
                continue  # it never came to write it whole
            if isinstance(settings, dict):
                return settings
        return None

    def log_file(self, attempt: int, rank: int) -> Path:
        """Return where a rank logs in an attempt; makes the directory. Any rank may call it."""
        directory = self._of_attempt(attempt)
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"rank_{rank:05d}.log"

    def _of_attempt(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt_{attempt:04d}"

    def close(self) -> None:
        """Close all files; a later record opens its file again."""
        for lines in (self.attempts, self.metrics, self.events, self.rollbacks):
            lines.close()
