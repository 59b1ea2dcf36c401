"""What a new attempt does with saves that older ones left: adopt the whole ones, sweep the rest.

Run by rank 0 of the new attempt, before it chooses (`takeover`). Every closed attempt's save is
renamed by this attempt itself, into a tag or into its own trash: the rename of the attempt's
directory alone lets a commit that is already on its way land afterwards.
"""

import os
from dataclasses import dataclass

from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Receipt
from engine.protocol import acquire, commit, files, local, takeover
from engine.protocol.acquire import attempt_numbers
from engine.protocol.commit import Published
from engine.protocol.files import Renamed
from engine.protocol.layout import CLOSED, MANIFEST, TRASH, CheckpointDirectory

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
    start = takeover.newest_start(directory, me)
    if start is not None:
        takeover.put_back_resumed(directory, me, start)
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
