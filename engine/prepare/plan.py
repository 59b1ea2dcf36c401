"""The work, in parts that are fixed before it begins.

A part becomes one pair of files. Which documents it has depends on the inputs and on the arguments
alone, never on the processes that share the work: so a start after a kill continues with the parts
that are missing, and any number of processes makes the same bytes. The plan is on disk as JSON; a
start whose own plan differs is refused, and says where.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from engine.prepare import inputs
from engine.prepare.encoders import Encoder
from engine.prepare.errors import UsageError
from engine.prepare.inputs import File, Reading, Span

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What is read, how, and into which parts."""

    files: Sequence[File]
    reading: Reading
    part_bytes: int
    encoder: dict[str, Any]
    parts: Sequence[Sequence[Span]]

    def to_json(self) -> dict[str, Any]:
        """Return what another start must agree with."""
        return {
            "version": VERSION,
            "reading": asdict(self.reading),
            "part_bytes": self.part_bytes,
            "encoder": self.encoder,
            "files": [asdict(file) for file in self.files],
        }

    def digest(self) -> str:
        """Return a digest of the plan. When files were written is not part of it."""
        content = self.to_json()
        content["files"] = [[file.path, file.size_bytes] for file in self.files]
        return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()

    def check_against(self, stored: str, where: str) -> None:
        """Check that this plan is the one that a killed start was carrying out.

        Raises:
            UsageError: it is not; names what differs.
        """
        try:
            then = dict(json.loads(stored))
        except (ValueError, TypeError):
            then = {}
        now = self.to_json()
        for key, value in now.items():
            if then.get(key) != value:
                detail = _changed_file(then.get(key), value) if key == "files" else ""
                raise UsageError(
                    f"{where} was begun with other inputs or arguments: {key} differs{detail}. "
                    "Give the same ones to continue it, or delete it to begin anew"
                )


def make(files: Sequence[File], reading: Reading, encoder: Encoder, part_bytes: int) -> Plan:
    """Return the plan. Every part but the last has spans of at least `part_bytes` in all."""
    parts: list[list[Span]] = []
    room = 0
    for file in files:
        for span in inputs.spans(file, reading, part_bytes):
            if room <= 0:
                parts.append([])
                room = part_bytes
            parts[-1].append(span)
            room -= span.cost_bytes
    if not parts:
        raise UsageError("the inputs hold no documents")
    identity = {
        **encoder.identity(),
        "vocab_size": encoder.vocab_size,
        "end_of_document": encoder.end_of_document,
    }
    return Plan(files, reading, part_bytes, identity, parts)


def _changed_file(then: Any, now: list[dict[str, Any]]) -> str:
    if not isinstance(then, list):
        return ""
    known = {entry.get("path"): entry for entry in then if isinstance(entry, dict)}
    for entry in now:
        if known.get(entry["path"]) != entry:
            return f" ({entry['path']} is {'changed' if entry['path'] in known else 'new'})"
    return " (a file is gone, or their order is another)"
