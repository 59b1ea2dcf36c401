"""The local tier: saves whose shards lie on the nodes' own disks, on their way to the shared one.

A local file by itself means nothing. What counts is a manifest in the *shared* directory, under
`.local/`, that names save id, size and digest of every rank's file; it arrives there as a tag does,
by one rename of the directory with all receipts, under the same fence. So a save is known to exist
from the shared directory alone, and whether its files still do is for each rank to find out.

Who runs what: a rank's writer makes and removes files of its own; rank 0's writer publishes and
drops the manifests; a new attempt clears what older ones left on its node, when it has chosen.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Manifest, Receipt
from engine.format.names import SaveId
from engine.protocol import commit, files
from engine.protocol.acquire import UnsuitableDirectoryError, attempt_numbers
from engine.protocol.commit import Published
from engine.protocol.files import Renamed
from engine.protocol.layout import MANIFEST, CheckpointDirectory
from engine.protocol.owner import Owner

_TRASHED = "local."


@dataclass(frozen=True)
class LocalDisk:
    """One rank's files of one run on its node's own disk.

    root  the run's folder: no other run has its name, `run_of`
    """

    root: str
    rank: int
    world_size: int

    def directory(self, save_id: str) -> str:
        """Path of the directory with the shards of a save that this node's ranks have made."""
        return os.path.join(self.root, save_id)

    def file(self, save_id: str) -> str:
        """Path of this rank's shard of a save."""
        return os.path.join(self.directory(save_id), names.shard_name(self.rank, self.world_size))

    def saves(self) -> list[SaveId]:
        """Return the saves that this rank has a file of, whole or not, oldest first."""
        return [save for save in _saves(self.root) if os.path.exists(self.file(str(save)))]

    def remove(self, save_id: SaveId) -> None:
        """Remove this rank's file of a save, and the directory with the last one."""
        _unlink(self.file(str(save_id)))
        _remove_if_empty(self.directory(str(save_id)))


def run_of(directory: CheckpointDirectory) -> str:
    """Return what names a run on its nodes' disks: its first attempt's nonce, which stays for ever.

    Raises FormatError, OSError: that attempt's record is damaged or cannot be read.
    """
    path = directory.attempt(min(attempt_numbers(directory))).owner
    with open(path, "rb") as file:
        return Owner.from_bytes(file.read(), path).nonce


def make_folder(local_dir: str, run: str, directory: CheckpointDirectory) -> str:
    """Make the folder of `run` on this node's own disk, see that it serves, and return its path.

    Raises UnsuitableDirectoryError where it cannot be made or written to, or is in the checkpoint
    directory itself.
    """
    shared, own = os.path.realpath(directory.root), os.path.realpath(local_dir)
    if os.path.commonpath([shared, own]) == shared:
        raise UnsuitableDirectoryError(
            f"checkpoint.local_dir={local_dir} is checkpoint.dir={directory.root}, or in it. Set "
            "it to a directory on each node's own disk, or to null"
        )
    folder = os.path.join(local_dir, run)
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".probe.{os.getpid()}")
        try:
            files.touch(probe)
            files.fsync_directory(folder)
        finally:
            _unlink(probe)
    except OSError as error:
        raise UnsuitableDirectoryError(
            f"checkpoint.local_dir={local_dir} does not serve on this node: {error}. Set it to a "
            "directory that each node can write to, or to null"
        ) from error
    return folder


def clear(
    root: str, directory: CheckpointDirectory, me: int, keep: str | None
) -> list[tuple[str, str]]:
    """Remove what attempts before `me` left in the run's folder `root` on this node.

    Of all ranks: where the scheduler has placed them anew, nobody comes back for their files. All
    but those of save `keep`, which `me` continues from, and those of attempts that this directory
    has no record of: they are a copied run's. Ranks of one node may call at once. Returns
    (path, why) of what could not be removed.
    """
    failed = []
    for save in _saves(root):
        if save.attempt >= me or str(save) == keep:
            continue
        path = os.path.join(root, str(save))
        try:
            if save.nonce == _nonce(directory, save.attempt):
                for name in files.listing(path):
                    _unlink(os.path.join(path, name))
                _remove_if_empty(path)
        except (OSError, FormatError) as error:
            failed.append((path, str(error)))
    return failed


def publish(
    directory: CheckpointDirectory,
    collected: str,
    draft: dict[str, Any],
    receipts: list[Receipt],
    by_attempt: int,
) -> Published:
    """Commit a save in the local tier: manifest into the directory `collected`, and rename that.

    `collected` holds the receipts of all ranks' local files; `by_attempt` must still be open right
    before the rename. Blocking; durable when it returns DONE.
    """
    manifest = Manifest.from_draft(draft, receipts)
    target = directory.local_save(manifest.tag, manifest.save_id)
    try:
        files.write_durably(os.path.join(collected, MANIFEST), manifest.to_bytes())
        files.remove_transient(collected)
    except OSError as error:
        if not files.is_gone(error):
            raise
        return Published.ALREADY if is_published(directory, manifest.save_id) else Published.GONE
    os.makedirs(directory.local_saves, exist_ok=True)
    if commit.is_fenced(directory, by_attempt):
        return Published.FENCED
    outcome = files.rename_new(collected, target)
    if outcome is Renamed.DONE:
        files.fsync_directory(directory.local_saves)
        return Published.DONE
    # No other save has its name.
    return Published.ALREADY if is_published(directory, manifest.save_id) else Published.GONE


def is_published(directory: CheckpointDirectory, save_id: str) -> bool:
    """Tell whether that save is committed in the local tier, and not dropped since."""
    name = os.path.basename(directory.local_save(SaveId.parse(save_id).tag, save_id))
    return name in files.fresh_listing(directory.local_saves)


def published(
    directory: CheckpointDirectory, on_error: Callable[[str, str], None]
) -> list[Manifest]:
    """Read the manifests of the local tier, newest step first.

    `on_error` is called with the path of one that cannot be read, and why.
    """
    manifests = []
    for name in files.fresh_listing(directory.local_saves):
        path = os.path.join(directory.local_saves, name)
        try:
            manifest = commit.read_manifest(path)
        except FormatError as error:
            on_error(path, str(error))
            continue
        if manifest is not None:
            manifests.append(manifest)
    return sorted(manifests, key=lambda manifest: -manifest.step)


def drop(directory: CheckpointDirectory, me: int, name: str) -> bool:
    """Take `name` of the local tier back, as attempt `me`; True if this call did.

    Where `me` has been closed meanwhile nothing happens: its trash has gone with it.
    """
    trash = os.path.join(directory.attempt(me).trash, f"{_TRASHED}{name}")
    source = os.path.join(directory.local_saves, name)
    if files.rename_new(source, trash) is not Renamed.DONE:
        return False
    files.remove_tree(trash, first=MANIFEST)
    return True


def drop_up_to(directory: CheckpointDirectory, me: int, step: int) -> None:
    """Take back what a tag of `step`, committed by attempt `me`, has made superfluous. Blocking."""
    for name in files.fresh_listing(directory.local_saves):
        of_name = names.step_of(name.partition(".")[0])
        if of_name is None or of_name <= step:
            drop(directory, me, name)


def _saves(root: str) -> list[SaveId]:
    """Return the saves that have a directory in a run's folder, oldest first."""
    found = []
    for name in files.listing(root):
        try:
            found.append(SaveId.parse(name))
        except FormatError:
            continue  # not ours
    return sorted(found, key=lambda save: (save.attempt, save.save_counter))


def _nonce(directory: CheckpointDirectory, attempt: int) -> str | None:
    path = directory.attempt(attempt).owner
    data = files.read_listed(path)
    return None if data is None else Owner.from_bytes(data, path).nonce


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if not files.is_gone(error):
            raise


def _remove_if_empty(directory: str) -> None:
    """Another rank of the node may still have a file there, or remove it at the same time."""
    try:
        os.rmdir(directory)
    except OSError as error:
        if not files.is_gone(error) and error.errno != errno.ENOTEMPTY:
            raise
