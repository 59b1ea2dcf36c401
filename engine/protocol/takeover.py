"""What a new attempt does with what older ones left: adopt whole saves, sweep the rest, choose.

Run by rank 0 of the new attempt, before its first step, in this order: `adopt`, `candidates`, and
once all ranks have agreed on a tag, `begin`. Every closed attempt's save is renamed by this attempt
itself, into a tag or into its own trash: the rename of the attempt's directory alone lets a commit
that is already on its way land afterwards.
"""

import logging
import os
from dataclasses import dataclass
from typing import Any

from engine.format import names, sealed
from engine.format.errors import FormatError
from engine.format.manifest import Manifest, Receipt
from engine.protocol import acquire, commit, files, history, local
from engine.protocol.acquire import attempt_numbers
from engine.protocol.commit import Published
from engine.protocol.files import Renamed
from engine.protocol.history import History
from engine.protocol.layout import (
    CLOSED,
    MANIFEST,
    START,
    TRASH,
    CheckpointDirectory,
)

logger = logging.getLogger(__name__)

_SWEPT = "swept."
LOCAL = "local"


@dataclass(frozen=True)
class TakenOver:
    """One save of an older attempt: its directory's name and what became of it."""

    attempt: int
    save: str
    outcome: str  # a Published value, "swept", or "local": committed in the local tier
    tag: str
    reason: str = ""


def adopt(directory: CheckpointDirectory, me: int) -> list[TakenOver]:
    """Commit every whole save of the closed attempts below `me`, and sweep what is not whole.

    Also puts the stray in place that the newest of them was to continue from.
    """
    results = []
    for number in attempt_numbers(directory):
        attempt = directory.attempt(number)
        if number >= me or CLOSED not in files.fresh_listing(attempt.path):
            continue
        for name in files.fresh_listing(attempt.closed):
            saved = names.save_of(name)
            if saved is not None:
                results.append(_adopt_one(directory, me, number, name, saved[0]))
            local_saved = names.save_of_local_receipts(name)  # sorted behind the save itself
            if local_saved is not None:
                results.append(_adopt_local(directory, me, number, name, local_saved[0]))
        trash = os.path.join(attempt.closed, TRASH)
        _clear_trash(directory, me, number, trash)
        for path in (attempt.path, attempt.closed, trash):
            files.remove_transient(path)
    tags = [n for n in files.fresh_listing(directory.root) if names.step_of(n) is not None]
    shared = (directory.root, directory.attempts, directory.local_saves)
    for path in (*shared, *map(directory.tag, tags)):
        files.remove_transient(path)
    acquire.remove_prepared(directory, me)
    start = newest_start(directory, me)
    if start is not None:
        _put_back_resumed(directory, start)
    return results


def _adopt_one(
    directory: CheckpointDirectory, me: int, number: int, name: str, tag: str
) -> TakenOver:
    save = os.path.join(directory.attempt(number).closed, name)
    try:
        outcome = _publish_if_whole(directory, me, save)
        reason = outcome.value if outcome else "receipts are missing"
    except FormatError as error:
        outcome, reason = None, str(error)
    if outcome in (Published.DONE, Published.FENCED):
        return TakenOver(number, name, outcome.value, tag)
    # A second copy of a committed save lies here where a writer was replaced: that goes, too.
    swept = _sweep(directory, me, number, save)
    return TakenOver(number, name, "swept" if swept else Published.GONE.value, tag, reason)


def _adopt_local(
    directory: CheckpointDirectory, me: int, number: int, name: str, tag: str
) -> TakenOver:
    """Commit in the local tier what has all receipts for it, and is not in the shared one."""
    collected = os.path.join(directory.attempt(number).closed, name)
    outcome, reason = None, "receipts are missing"
    try:
        found = _draft_if_whole(collected)
        if found is not None and commit.is_committed(directory, found.save_id):
            reason = "it is committed"
        elif found is not None:
            receipts = commit.read_receipts(
                collected, found.world_size, found.save_id, beside_shards=False
            )
            if receipts is not None:
                outcome = local.publish(directory, collected, found.draft, receipts, me)
    except FormatError as error:
        reason = str(error)
    if outcome is Published.DONE:
        return TakenOver(number, name, LOCAL, tag)
    swept = _sweep(directory, me, number, collected)
    return TakenOver(number, name, "swept" if swept else Published.GONE.value, tag, reason)


def _sweep(directory: CheckpointDirectory, me: int, number: int, path: str) -> bool:
    """Move what attempt `number` left at `path` to my trash, which my writer empties."""
    name = os.path.basename(path)
    if not name.startswith(_SWEPT):  # two attempts may both have left a save of this name
        name = f"{_SWEPT}{names.attempt_name(number)}.{name}"
    return files.rename_new(path, os.path.join(directory.attempt(me).trash, name)) is Renamed.DONE


def _publish_if_whole(directory: CheckpointDirectory, me: int, save: str) -> Published | None:
    first = _draft_if_whole(save)
    if first is None:
        return None
    receipts = commit.read_receipts(save, first.world_size, first.save_id)
    if receipts is None:
        return Published.GONE
    draft = first.draft
    return commit.publish(
        directory, save, draft, receipts, me, lambda held: held.attempt < int(draft["attempt"])
    )


def _draft_if_whole(save: str) -> Receipt | None:
    """Return rank 0's receipt, which holds the manifest's draft, if all receipts are there."""
    listed = files.fresh_listing(save)
    first = next(filter(names.is_receipt_of_rank_0, listed), None)
    data = None if first is None else files.read_listed(os.path.join(save, first))
    if first is None or data is None:
        return None
    receipt = Receipt.from_bytes(data, os.path.join(save, first))
    return None if commit.missing_receipts(listed, receipt.world_size) else receipt


def _clear_trash(directory: CheckpointDirectory, me: int, number: int, trash: str) -> None:
    """Put back the tags that a writer was about to prune when its attempt was closed; sweep the
    rest.

    A pruned tag lies there as `<tag>.<save id>`. Its manifest is unlinked first, so one that still
    has it is whole.
    """
    for name in files.fresh_listing(trash):
        path = os.path.join(trash, name)
        tag, _, save_id = name.partition(".")
        pruned = names.step_of(tag) is not None and save_id.startswith("a")
        whole = pruned and MANIFEST in files.fresh_listing(path)
        if not whole or files.rename_new(path, directory.tag(tag)) is Renamed.TAKEN:
            _sweep(directory, me, number, path)


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
    what `me` resumed from stays. Returns the attempt's history and the manifests of the strays that
    were moved.
    """
    parent = () if resumed is None else tuple(history.Link(*link) for link in resumed.history)
    line = history.extend(parent, me, 0 if resumed is None else resumed.step)
    start = Start(line, None if resumed is None else resumed.save_id)
    files.write_durably(directory.attempt(me).start, start.to_bytes())
    manifests, _ = committed(directory)
    off_line = [m for m in manifests if not history.covers(line, m.attempt, m.step)]
    strays = [manifest for manifest in off_line if commit.set_aside(directory, manifest)]
    _put_back_resumed(directory, start)
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


def _put_back_resumed(directory: CheckpointDirectory, start: Start) -> None:
    """A stray that a run continues from is no stray any more.

    Left there, the next resume=auto would find nothing on the line until the first commit.
    """
    if start.resumed_from is None:
        return
    tag = names.SaveId.parse(start.resumed_from).tag
    stray = directory.stray(tag, start.resumed_from)
    if os.path.basename(stray) not in files.fresh_listing(directory.strays):
        return
    for held in committed(directory)[0]:
        if held.tag == tag and not history.covers(start.line, held.attempt, held.step):
            commit.set_aside(directory, held)
    files.rename_new(stray, directory.tag(tag))
