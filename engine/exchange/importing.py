"""Import: a ZeRO-3 checkpoint that DeepSpeed wrote becomes a committed checkpoint of this format.

Masters, optimizer state, schedule, loss scale, counters, frozen weights and buffers come over bit
for bit, at the world size that saved them; the run goes on by `resume=auto`, at any. The import is
an attempt like any other: it takes a number, writes shards and receipts, and commits by one rename.
One that dies leaves what the next attempt sweeps. One process; a rank's files at a time, mapped.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from engine.checkpoint.draft import DraftWriter, Lineage
from engine.checkpoint.errors import CheckpointError
from engine.exchange.deepspeed_files import DeepSpeedCheckpoint
from engine.exchange.deepspeed_layout import Part
from engine.exchange.description import Description, Options
from engine.exchange.errors import ExchangeError
from engine.format.errors import FormatError
from engine.format.manifest import Receipt
from engine.format.names import SaveId, receipt_name, save_directory, shard_name
from engine.format.shard import metadata_of
from engine.protocol import adoption, commit, files, takeover
from engine.protocol.acquire import Lease, RunHeldError, UnsuitableDirectoryError, acquire
from engine.protocol.commit import Published
from engine.protocol.layout import MANIFEST, CheckpointDirectory
from engine.protocol.owner import Owner

_CHUNK_BYTES = 8 << 20
_ERRORS = (RunHeldError, UnsuitableDirectoryError, CheckpointError, FormatError, OSError)


@dataclass(frozen=True)
class Imported:
    """What came of it: the tag, and lines for people to know."""

    tag: str
    world_size: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: DeepSpeedCheckpoint,
    root: str,
    options: Options,
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Import `source` into the checkpoints directory `root`. Blocks until it is committed.

    Args:
        root: made if it is not there; must hold no checkpoint.
        progress: called with the bytes written since its last call.

    Raises:
        ExchangeError: the source cannot be read, holds what cannot be stored, or `root` holds a run
            or cannot be written. Nothing is committed then.
    """
    directory = CheckpointDirectory(os.path.abspath(root))
    first = source.load(0)
    described = Description.of(source, first, options)
    _refuse_a_run(directory)
    try:
        owner = acquire(directory, Owner.this_process(source.world_size, {}), Lease())
        try:
            adoption.adopt(directory, owner.attempt)
            _import(source, directory, owner, described, progress or _silent)
        finally:
            attempt = directory.attempt(owner.attempt)
            files.rename_new(attempt.open, attempt.closed)
    except _ERRORS as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise ExchangeError(f"nothing was imported: {text}") from error
    return Imported(described.tag, source.world_size, described.notes)


def _import(
    source: DeepSpeedCheckpoint,
    directory: CheckpointDirectory,
    owner: Owner,
    described: Description,
    progress: Callable[[int], None],
) -> None:
    line, _ = takeover.begin(directory, owner.attempt, None)
    lineage = Lineage(line, None, dict(described.fingerprint))
    save_id = SaveId(owner.attempt, 1, described.tag, owner.nonce)
    save = directory.attempt(owner.attempt).save(save_directory(described.tag, 1))
    os.mkdir(save)
    try:
        receipts: list[Receipt] = []
        structure = None
        for rank in range(source.world_size):
            states = source.load(rank)
            part = Part.of(states, rank, source.world_size, described.aliases)
            structure = structure or part.plan.structure
            if part.plan.structure != structure:
                raise ExchangeError(f"{source.path}: rank {rank} has other state than rank 0")
            draft = None
            if rank == 0:
                draft = _draft(part, save_id, lineage, described)
            receipts.append(_write(save, part, save_id, draft, progress))
        outcome = commit.publish(
            directory, save, receipts[0].draft, receipts, owner.attempt, lambda held: False
        )
        if outcome is not Published.DONE:
            raise ExchangeError(f"{described.tag} was not committed: {outcome.value}")
        commit.point_latest(directory, described.tag)
    except BaseException:
        files.remove_tree(save, first=MANIFEST)
        raise


def _draft(part: Part, save_id: SaveId, lineage: Lineage, described: Description) -> Any:
    writer = DraftWriter(part.layout, described.optimizer_kind, lineage)
    begun = writer.begin(save_id, part.plan, part.live, described.state, described.progress)
    return json.loads(writer.end(begun, 0.0))


def _write(
    save: str, part: Part, save_id: SaveId, draft: Any, progress: Callable[[int], None]
) -> Receipt:
    """Write one rank's shard and receipt, durably."""
    started = time.monotonic()
    rank, world_size = part.layout.rank, part.layout.world_size
    header = part.plan.shard.header_bytes(metadata_of(str(save_id), rank, world_size))
    whole = xxhash.xxh3_128(header)
    with open(os.path.join(save, shard_name(rank, world_size)), "xb") as file:
        file.write(header)
        for data in part.contents():
            for begin in range(0, len(data), _CHUNK_BYTES):
                chunk = data[begin : begin + _CHUNK_BYTES]
                whole.update(chunk)
                file.write(chunk)
                progress(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    receipt = Receipt(
        name=shard_name(rank, world_size),
        size_bytes=part.plan.shard.size_bytes,
        data_offset=len(header),
        header_digest=xxhash.xxh3_128_hexdigest(header),
        digest=whole.hexdigest(),
        save_id=str(save_id),
        rank=rank,
        world_size=world_size,
        seconds=time.monotonic() - started,
        draft=draft,
    )
    files.write_durably(os.path.join(save, receipt_name(rank, world_size)), receipt.to_bytes())
    return receipt


def _refuse_a_run(directory: CheckpointDirectory) -> None:
    if os.path.isdir(directory.root):
        manifests, passed_over = takeover.committed(directory)
        if manifests or passed_over or os.path.isdir(directory.strays):
            raise ExchangeError(
                f"--out {directory.root}: there are checkpoints of a run in it. Import into a "
                "directory of its own"
            )


def _silent(count: int) -> None:
    """Show no progress."""
