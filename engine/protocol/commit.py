"""The commit: a save whose receipts are all there becomes a tag by one rename.

Run by the writer of rank 0 of the attempt that made the save, or by rank 0 of a later attempt that
adopts it. Both may try at once: the rename lets one of them through, and the other one finds the
save's own id under the tag. No collective, no lock.
"""

import enum
import os
from collections.abc import Callable
from typing import Any

from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Manifest, Receipt
from engine.protocol import files
from engine.protocol.files import Renamed
from engine.protocol.layout import CLOSED, MANIFEST, OPEN, CheckpointDirectory


class Published(enum.Enum):
    """What became of a whole save."""

    DONE = "done"  # committed by this call
    ALREADY = "already"  # committed before, by this attempt or by one that adopted it
    GONE = "gone"  # abandoned, or swept by a newer attempt
    FENCED = "fenced"  # a newer attempt has taken over; nothing was touched
    TAKEN = "taken"  # another save of this run holds the tag


def is_fenced(directory: CheckpointDirectory, attempt: int) -> bool:
    """Tell whether attempt number `attempt` is over, as a fresh listing shows it."""
    return OPEN not in files.fresh_listing(directory.attempt(attempt).path)


def is_taken_over(directory: CheckpointDirectory, attempt: int) -> bool:
    """Tell whether attempt number `attempt` has been closed, as far as can be seen.

    Not where its directory has vanished or cannot be looked into: nobody has taken over then, the
    disk has failed.
    """
    try:
        return CLOSED in files.fresh_listing(directory.attempt(attempt).path)
    except OSError:
        return False


def missing_receipts(listed: list[str], world_size: int) -> list[int]:
    """Return the ranks whose receipt is not among the names of a save's directory."""
    present = set(listed)
    return [r for r in range(world_size) if names.receipt_name(r, world_size) not in present]


def read_receipts(
    save: str, world_size: int, save_id: str, beside_shards: bool = True
) -> list[Receipt] | None:
    """Read all receipts of a save whose listing shows them all; None if the save has gone.

    `beside_shards` is False for receipts of files on the nodes' own disks, which cannot be seen.

    Raises:
        FormatError: a receipt is damaged, belongs to another save, or its shard's size differs.
    """
    receipts = []
    for rank in range(world_size):
        path = os.path.join(save, names.receipt_name(rank, world_size))
        data = files.read_listed(path)
        if data is None:
            return None
        receipt = Receipt.from_bytes(data, path)
        if receipt.save_id != save_id:
            raise FormatError(f"{path}: belongs to save {receipt.save_id}, wanted {save_id}")
        if beside_shards and not _is_beside_its_shard(receipt, path):
            return None
        receipts.append(receipt)
    return receipts


def _is_beside_its_shard(receipt: Receipt, path: str) -> bool:
    """Tell whether the shard of the receipt at `path` is there; raise FormatError for its size."""
    try:
        size = os.stat(os.path.join(os.path.dirname(path), receipt.name)).st_size
    except OSError as error:
        if files.is_gone(error):
            return False
        raise
    if size != receipt.size_bytes:
        raise FormatError(
            f"{path}: its shard has {size} bytes, the receipt says {receipt.size_bytes}"
        )
    return True


def publish(
    directory: CheckpointDirectory,
    save: str,
    draft: dict[str, Any],
    receipts: list[Receipt],
    by_attempt: int,
    may_replace: Callable[[Manifest], bool],
) -> Published:
    """Commit the whole save at path `save`: manifest in last, then rename it to its tag.

    `by_attempt` is the attempt that commits: right before the rename it must still be open.
    `may_replace` is asked when the tag is taken by another save's manifest; true moves that tag to
    the strays. Blocking; durable when it returns DONE.
    """
    manifest = Manifest.from_draft(draft, receipts)
    try:
        files.write_durably(os.path.join(save, MANIFEST), manifest.to_bytes())
        files.remove_transient(save)  # what a killed writer was in the middle of
    except OSError as error:
        if files.is_gone(error):
            return _after_gone(directory, manifest)
        raise
    for _ in range(3):  # the tag in the way may be moved aside, and once more by a fenced writer
        if is_fenced(directory, by_attempt):
            return Published.FENCED
        outcome = files.rename_new(save, directory.tag(manifest.tag))
        if outcome is Renamed.DONE:
            files.fsync_directory(directory.root)
            return Published.DONE
        if outcome is Renamed.GONE:
            return _after_gone(directory, manifest)
        holder = read_manifest(directory.tag(manifest.tag))
        if holder is not None and holder.save_id == manifest.save_id:
            return Published.ALREADY
        if holder is None or not may_replace(holder):
            return Published.TAKEN
        set_aside(directory, holder)
    return Published.TAKEN


def set_aside(directory: CheckpointDirectory, manifest: Manifest) -> bool:
    """Move a committed tag, whole, to the strays. True if this call moved it."""
    os.makedirs(directory.strays, exist_ok=True)
    target = directory.stray(manifest.tag, manifest.save_id)
    return files.rename_new(directory.tag(manifest.tag), target) is Renamed.DONE


def read_manifest(tag_directory: str) -> Manifest | None:
    """Read the manifest of a committed directory; None if there is none. Raises FormatError."""
    if MANIFEST not in files.fresh_listing(tag_directory):
        return None
    path = os.path.join(tag_directory, MANIFEST)
    data = files.read_listed(path)
    return None if data is None else Manifest.from_bytes(data, path)


def point_latest(directory: CheckpointDirectory, tag: str) -> None:
    """Let `latest` name the committed `tag`."""
    files.write_durably(directory.latest, f"{tag}\n".encode())


def is_committed(directory: CheckpointDirectory, save_id: str) -> bool:
    """Tell whether that save, and not another one, is under its tag now."""
    tag = names.SaveId.parse(save_id).tag
    if tag not in files.fresh_listing(directory.root):
        return False
    holder = read_manifest(directory.tag(tag))
    return holder is not None and holder.save_id == save_id


def _after_gone(directory: CheckpointDirectory, manifest: Manifest) -> Published:
    """The save's directory has gone: somebody committed it, or swept it."""
    return Published.ALREADY if is_committed(directory, manifest.save_id) else Published.GONE
