"""Which committed tags may go, and their removal. Run by rank 0's writer, after a commit.

Only tags of the run's own history are considered, a tag goes only after a newer one has committed,
and a failure here is reported, never raised into the save that has just succeeded.
"""

import os
from collections.abc import Sequence

from engine.format.manifest import Manifest
from engine.protocol import files, history, takeover
from engine.protocol.commit import is_fenced
from engine.protocol.files import Renamed
from engine.protocol.history import Link
from engine.protocol.layout import MANIFEST, CheckpointDirectory


def expired(manifests: Sequence[Manifest], line: Sequence[Link], keep_last: int) -> list[Manifest]:
    """Return the tags on history `line` that are not among its `keep_last` newest. Pure.

    The tag an attempt resumed from is on its line, so it goes only when `keep_last` newer ones
    have committed.
    """
    own = [m for m in manifests if history.covers(line, m.attempt, m.step)]
    return sorted(own, key=lambda manifest: -manifest.step)[keep_last:]


def prune(
    directory: CheckpointDirectory, me: int, line: Sequence[Link], keep_last: int
) -> list[str]:
    """Remove the expired tags of attempt `me`'s history; return their names. Blocking."""
    manifests, _ = takeover.committed(directory)
    pruned: list[str] = []
    for manifest in expired(manifests, line, keep_last):
        if is_fenced(directory, me):
            return pruned
        trash = os.path.join(directory.attempt(me).trash, f"{manifest.tag}.{manifest.save_id}")
        if files.rename_new(directory.tag(manifest.tag), trash) is not Renamed.DONE:
            continue
        if is_fenced(directory, me):
            return pruned  # a newer attempt finds it whole in the closed trash, and puts it back
        files.remove_tree(trash, first=MANIFEST)
        pruned.append(manifest.tag)
    return pruned


def empty_trash(directory: CheckpointDirectory, me: int) -> None:
    """Delete what lies in attempt `me`'s trash. Blocking."""
    trash = directory.attempt(me).trash
    for name in files.listing(trash):
        files.remove_tree(os.path.join(trash, name), first=MANIFEST)
