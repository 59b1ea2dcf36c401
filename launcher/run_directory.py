"""The files of a run directory that people and scripts read; rank 0 writes them.

Owns config.yaml, attempts.jsonl, metrics.jsonl, events.jsonl and the place of the ranks' logs.
Nothing is ever written over: lines are appended, and the first attempt's configuration is kept.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class JsonLines:
    """An append-only file of one JSON object per line, each visible as soon as it is written.

    Floats are written by `repr`, so that they can be compared bit by bit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def read(self) -> list[dict[str, Any]]:
        """Return the whole records; a line that a killed attempt left unfinished is passed over."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        records = []
        for line in text.splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return records

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        """Open for appending; end an unfinished last line first, so as not to spoil our own."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        return open(self._path, "a", encoding="utf-8")


class RunDirectory:
    """Where one run keeps what it tells the world."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.attempts = JsonLines(self.path / "attempts.jsonl")
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.events = JsonLines(self.path / "events.jsonl")

    def keep_first_configuration(self, settings: Mapping[str, Any]) -> None:
        """Write config.yaml unless it is there."""
        from omegaconf import OmegaConf

        try:
            with open(self.path / "config.yaml", "x", encoding="utf-8") as file:
                file.write(OmegaConf.to_yaml(OmegaConf.create(dict(settings))))
        except FileExistsError:
            return

    def log_file(self, attempt: int, rank: int) -> Path:
        """Return where a rank logs in an attempt; makes the directory. Any rank may call it."""
        directory = self.path / "logs" / f"attempt_{attempt:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"rank_{rank:05d}.log"

    def close(self) -> None:
        for lines in (self.attempts, self.metrics, self.events):
            lines.close()
