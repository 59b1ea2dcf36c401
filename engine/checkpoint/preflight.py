"""Is there room for what is to come? Asked once, before the first save and before the images.

Collective: the ranks of a host share its memory, and all ranks share the disk. What cannot work is
refused with the numbers, on every rank alike; what will work for now is an event.
"""

import hashlib
import logging
import os

from engine.checkpoint import memory, old_writers
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.handover import BACKLOG, IMAGES
from engine.checkpoint.options import CheckpointOptions
from engine.checkpoint.session import Session
from engine.format import names
from engine.protocol import files
from engine.protocol.owner import Place

logger = logging.getLogger(__name__)


def check(session: Session, shard_bytes: int, options: CheckpointOptions) -> None:
    """Check that this host's memory holds the images, and the disk two checkpoints at least.

    `shard_bytes` is this rank's; 0 where it is not known, which leaves this rank out. Called after
    resuming: where memory is short, the writers of earlier attempts on this host are ended.

    A disk that has no room for `keep_last` checkpoints and one more is the event `low_space`, and
    so is a node's own disk that cannot hold all saves which may be on their way from there.
    Quotas do not show in what a file system says is free, and other tenants' writes are not
    foreseen.

    Raises:
        CheckpointError: there is not enough of either, on any host.
    """
    rows = session.agreement.gather([_this_host(), shard_bytes])
    local = [size for host, size in rows if host == _this_host()]
    try:
        _make_room(session, IMAGES * sum(local))
        reasons = [_lack_of_memory(local)]
        is_first_here = _this_host() not in [host for host, _ in rows[: session.rank]]
        if session.local is not None and is_first_here:
            _look_at_local_space(session, session.local.root, local)
        if session.rank == 0:
            total = sum(size for _, size in rows)
            reasons.append(_lack_of_space(session, total, options.keep_last))
    except OSError as error:
        reasons = [f"how much room there is for checkpoints cannot be found out: {error}"]
    reason = "; ".join(filter(None, reasons))
    # No rank takes memory before all have looked.
    session.agreement.require(reason, CheckpointError)


def _this_host() -> int:
    boot_id = Place.here().boot_id.encode()  # one kernel, one memory, whatever the containers
    return int.from_bytes(hashlib.blake2b(boot_id, digest_size=7).digest(), "big")


def _make_room(session: Session, needed_bytes: int) -> None:
    """Where memory is short, take back what an earlier attempt's writers still hold."""
    if memory.room().free_bytes < needed_bytes:
        ended = old_writers.reclaim(session.directory, session.attempt)
        if ended:
            logger.warning("memory was short: ended an earlier attempt's writers %s", ended)


def _lack_of_memory(shards: list[int]) -> str:
    needed = IMAGES * sum(shards)
    room = memory.room()
    if needed <= room.free_bytes:
        return ""
    return (
        f"staging needs {IMAGES} images of each rank's state in memory: {needed} bytes for the "
        f"{len(shards)} ranks of host {Place.here().host}, where {room.free_bytes} are free "
        f"({room.limit}). Give the job more memory (Slurm: --mem), or start fewer ranks on a host "
        "(launch.ranks)"
    )


def _lack_of_space(session: Session, checkpoint_bytes: int, keep_last: int) -> str:
    """Return why the disk is too small; emit an event where it is only smaller than wanted."""
    root = session.directory.root
    status = os.statvfs(root)
    if status.f_blocks == 0:  # some network and FUSE mounts do not say
        return ""
    free = status.f_bavail * status.f_frsize
    present = sum(names.step_of(name) is not None for name in files.listing(root))
    least = (2 - min(present, 1)) * checkpoint_bytes
    wanted = (keep_last + 1 - min(present, keep_last)) * checkpoint_bytes
    numbers = (
        f"a checkpoint has {checkpoint_bytes} bytes, {present} are in {root}, and {free} bytes are "
        "free there"
    )
    if free < least:
        return (
            f"checkpoint.dir has no room for two checkpoints, the newest and the one being "
            f"written: {numbers}, where {least} are needed. Make room, or set checkpoint.dir to a "
            "larger file system"
        )
    if free < wanted:
        session.emit(
            "low_space",
            free_bytes=free,
            needed_bytes=wanted,
            reason=f"{numbers}; checkpoint.keep_last={keep_last} and one more need {wanted}",
        )
    return ""


def _look_at_local_space(session: Session, folder: str, shards: list[int]) -> None:
    """Emit an event where this node's own disk is smaller than wanted. No reason to stop: what has
    no room there goes straight to the shared directory.
    """
    status = os.statvfs(folder)
    free, wanted = status.f_bavail * status.f_frsize, (BACKLOG + 1) * sum(shards)
    if status.f_blocks and free < wanted:
        session.emit(
            "low_space",
            free_bytes=free,
            needed_bytes=wanted,
            reason=f"{BACKLOG + 1} saves, which may wait in checkpoint.local_dir for "
            f"checkpoint.dir, have {wanted} bytes on host {Place.here().host}, and {free} bytes "
            f"are free in {folder}. Saves that have no room there go straight to checkpoint.dir. "
            "Make room, or set checkpoint.local_dir to a larger disk",
        )
