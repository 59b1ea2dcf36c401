"""Read a rank's part of one candidate, from the nearest disk that has it. Not collective; blocks.

It is compared with the live engine first: nothing is allocated for a checkpoint that does not fit.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from engine.checkpoint.session import Session
from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.zero3 import optimizer_kind
from engine.format.manifest import Manifest
from engine.resume import reshard, validate
from engine.resume.choose import Candidate
from engine.resume.errors import DamagedShardError
from engine.resume.shard_reader import ShardReader
from engine.resume.targets import Targets
from engine.resume.windows import Windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadPart:
    """What a rank has read of a candidate.

    candidate   where it was read from
    bytes_read, seconds  of reading and checking
    from_local  whether it came from the node's own disk
    """

    candidate: Candidate
    targets: Targets
    bytes_read: int
    seconds: float
    from_local: bool


def read_nearest(
    session: Session, candidate: Candidate, whole: Mapping[str, torch.Tensor], *, full: bool
) -> ReadPart:
    """Read this rank's part from its node's own disk if it is there, else from the shared one.

    Args:
        whole: the live buffers and RNG states, by entry name.
        full: whether every shard is digested; else sizes and headers are checked.

    Raises:
        DamagedShardError: a file is damaged, missing, or another save's.
        MismatchError: the checkpoint is of another model or optimizer.
    """
    disk, manifest = session.local, candidate.manifest
    if disk is None or manifest.world_size != disk.world_size:
        return _read(session, candidate, whole, full)
    path = disk.file(manifest.save_id)
    is_here = os.path.exists(path)  # no other host makes it: not to be waited for
    if not is_here and candidate.is_local:
        raise DamagedShardError(f"{path}: there is no such file")
    if is_here:
        near = replace(candidate, shards=disk.directory(manifest.save_id))
        try:
            return _read(session, near, whole, full)
        except DamagedShardError as error:
            if candidate.is_local:
                raise
            logger.warning("read from %s instead: %s", candidate.path, error)
            session.emit("local_unusable", tag=manifest.tag, reason=str(error))
    return _read(session, candidate, whole, full)


def _read(
    session: Session, candidate: Candidate, whole: Mapping[str, torch.Tensor], full: bool
) -> ReadPart:
    manifest, layout = candidate.manifest, session.layout
    group_count = len(session.ds_engine.optimizer.optimizer.param_groups)
    validate.check(manifest, layout, optimizer_kind(session.ds_engine), group_count, whole)
    wanted = validate.wanted_whole(manifest, layout, whole)
    targets = Targets.of(manifest, layout, [entry.name for entry in wanted])
    checkers = reshard.checkers(manifest.world_size, layout.world_size)
    mine = {shard for shard, rank in enumerate(checkers) if rank == layout.rank}
    from_local = candidate.shards is not None
    # A file of the local tier is nothing without its digest.
    full = full or from_local
    started = time.monotonic()
    count = _counter(session, manifest.save_id, _bytes_to_read(manifest, targets, mine, full))
    with Windows() as windows, ShardReader(candidate, windows, full=full, progress=count) as reader:
        reader.read(targets.takes, targets.tensors, mine)
        seconds = time.monotonic() - started
        return ReadPart(candidate, targets, reader.bytes_read, seconds, from_local)


def _bytes_to_read(manifest: Manifest, targets: Targets, whole: set[int], full: bool) -> int:
    """Return what a rank reads: its shards to check are read `whole`, if digests are taken."""
    digested = whole if full else set()
    wanted: int = sum(
        take.size * targets.tensors[take.target].element_size()
        for take in targets.takes
        if take.shard not in digested
    )
    return wanted + sum(manifest.shards[shard].size_bytes for shard in digested)


def _counter(session: Session, save_id: str, total: int) -> Callable[[int], None]:
    """Return what tells how far the reading is, given the bytes since its last call."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done = min(done + size, total)  # windows hold bytes beside what is wanted, too
        if session.on_progress is not None:
            session.on_progress(UnderWay("resume", save_id, done, total))

    return count
