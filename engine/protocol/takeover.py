"""What a new attempt continues from: the committed tags, the run's newest history, and its record.

Run by rank 0 of the new attempt, before its first step, in this order: `adoption.adopt`, then
`candidates`, and once all ranks have agreed on one, `begin`.
"""

import os
from dataclasses import dataclass
from typing import Any

from engine.format import names, sealed
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.protocol import commit, files, history, local
from engine.protocol.acquire import attempt_numbers
from engine.protocol.history import History
from engine.protocol.layout import (
    MANIFEST,
    START,
    CheckpointDirectory,
)


@dataclass(frozen=True)
class PassedOver:
    """A directory with a tag's name that cannot be resumed from.

    damaged  True if its manifest is there and cannot be read; False if it was never committed
    """

    path: str
    reason: str
    damaged: bool


def committed(directory: CheckpointDirectory) -> tuple[list[Manifest], list[PassedOver]]:
    """Read the manifests of all committed tags, newest step first, and what has none."""
    manifests, passed_over = [], []
    for name in files.fresh_listing(directory.root):
        if names.step_of(name) is None:
            continue
        path = directory.tag(name)
        try:
            manifest = commit.read_manifest(path)
            if manifest is not None and manifest.tag != name:
                raise FormatError(f"{path}: its manifest is of tag {manifest.tag}")
        except FormatError as error:
            passed_over.append(PassedOver(path, str(error), damaged=True))
            continue
        if manifest is None:
            reason = f"{path}: there is no {MANIFEST}, so it was never committed"
            passed_over.append(PassedOver(path, reason, damaged=False))
        else:
            manifests.append(manifest)
    return sorted(manifests, key=lambda manifest: -manifest.step), passed_over


@dataclass(frozen=True)
class Start:
    """What an attempt descends from, as start.json holds it; `resumed_from` is a save id."""

    line: History
    resumed_from: str | None

    def to_bytes(self) -> bytes:
        """Return the document of start.json."""
        document = {"history": history.to_json(self.line), "resumed_from": self.resumed_from}
        return sealed.dumps(document)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Start":
        """Read start.json. Raises engine.format.errors.FormatError when it is damaged."""
        document: Any = sealed.loads(data, path)
        return cls(history.from_json(document["history"]), document["resumed_from"])


def newest_start(directory: CheckpointDirectory, below: int) -> Start | None:
    """Return what the newest attempt under `below` recorded, of those that did."""
    for number in sorted(attempt_numbers(directory), reverse=True):
        attempt = directory.attempt(number)
        if number < below and START in files.fresh_listing(attempt.path):
            data = files.read_listed(attempt.start)
            if data is not None:
                return Start.from_bytes(data, attempt.start)
    return None


def candidates(directory: CheckpointDirectory, me: int) -> tuple[list[Manifest], list[PassedOver]]:
    """Return the tags on the run's newest history, newest step first, and what was passed over."""
    manifests, passed_over = committed(directory)
    start = newest_start(directory, me)
    if start is not None:
        manifests = [m for m in manifests if history.covers(start.line, m.attempt, m.step)]
    return manifests, passed_over


def local_candidates(
    directory: CheckpointDirectory, me: int
) -> tuple[list[Manifest], list[PassedOver]]:
    """Return the saves on the run's newest history that are only in the local tier, newest first.

    Whether their files are still there is not looked at.
    """
    passed_over: list[PassedOver] = []
    manifests = local.published(
        directory, lambda path, why: passed_over.append(PassedOver(path, why, damaged=True))
    )
    start = newest_start(directory, me)
    if start is not None:
        manifests = [m for m in manifests if history.covers(start.line, m.attempt, m.step)]
    shared = {manifest.save_id for manifest in committed(directory)[0]}
    return [m for m in manifests if m.save_id not in shared], passed_over


def begin(
    directory: CheckpointDirectory, me: int, resumed: Manifest | None
) -> tuple[History, list[Manifest]]:
    """Record what attempt `me` descends from, then set aside the tags that are off that line.

    The record comes first: after it, those tags are strays whoever looks. Of the local tier only
    what `me` resumed from stays. Nothing is moved any more once `me` is over: to an attempt whose
    host slept in here for longer than the lease, its successor's commits look like strays. Returns
    the attempt's history and the manifests of the strays that were moved.
    """
    parent = () if resumed is None else tuple(history.Link(*link) for link in resumed.history)
    line = history.extend(parent, me, 0 if resumed is None else resumed.step)
    start = Start(line, None if resumed is None else resumed.save_id)
    files.write_durably(directory.attempt(me).start, start.to_bytes())
    manifests, _ = committed(directory)
    off_line = [m for m in manifests if not history.covers(line, m.attempt, m.step)]
    strays = [
        manifest
        for manifest in off_line
        if not commit.is_fenced(directory, me) and commit.set_aside(directory, manifest)
    ]
    put_back_resumed(directory, me, start)
    if commit.is_fenced(directory, me):
        return line, strays
    _drop_local(directory, me, start)
    on_line, _ = committed(directory)
    if on_line:
        commit.point_latest(directory, on_line[0].tag)
    return line, strays


def _drop_local(directory: CheckpointDirectory, me: int, start: Start) -> None:
    """Newer ones are off the line from here on, and older ones of no use."""
    resumed = start.resumed_from
    if resumed is not None and commit.is_committed(directory, resumed):
        resumed = None  # its writer died between that and dropping it here
    for name in files.fresh_listing(directory.local_saves):
        if name.partition(".")[2] != resumed:
            local.drop(directory, me, name)


def put_back_resumed(directory: CheckpointDirectory, me: int, start: Start) -> None:
    """A stray that a run continues from is no stray any more.

    Left there, the next resume=auto would find nothing on the line until the first commit. Nothing
    is moved once attempt `me`, which does this, is over.
    """
    if start.resumed_from is None or commit.is_fenced(directory, me):
        return
    tag = names.SaveId.parse(start.resumed_from).tag
    stray = directory.stray(tag, start.resumed_from)
    if os.path.basename(stray) not in files.fresh_listing(directory.strays):
        return
    for held in committed(directory)[0]:
        if held.tag == tag and not history.covers(start.line, held.attempt, held.step):
            commit.set_aside(directory, held)
    files.rename_new(stray, directory.tag(tag))
