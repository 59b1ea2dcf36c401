"""The commit of a save of thousands of ranks: how long rank 0's writer takes, how large a manifest.

The ranks are simulated: their receipts are real, and written by a few processes; their shards have
the right size and no content.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.format import names
from engine.format.digest import digest_bytes
from engine.format.manifest import Parameter, Receipt
from engine.protocol import commit
from engine.protocol.commit import Published
from engine.protocol.layout import MANIFEST, CheckpointDirectory
from tests.protocol.driver.content import make_draft

RANKS = 4096
_PARAMETERS = 700  # of a transformer with some 80 layers
_NUMEL = 1 << 27
_SHARD_BYTES = 1 << 20
_PROCESSES = 4
_SAVE_ID = names.SaveId(0, 1, "global_step10", "5ca1ab1e")


def measure(root: str) -> dict[str, Any]:
    """Commit one such save under `root`; return seconds and the manifest's bytes."""
    directory = CheckpointDirectory(os.path.join(root, "commit"))
    save = directory.attempt(0).save("global_step10.s0001")
    os.makedirs(save)
    os.makedirs(directory.attempt(0).trash)
    with ProcessPoolExecutor(_PROCESSES) as pool:
        list(pool.map(_write_receipt, [save] * RANKS, range(RANKS), chunksize=64))
    started = time.perf_counter()
    receipts = commit.read_receipts(save, RANKS, str(_SAVE_ID))
    assert receipts is not None, "the save is there"
    read = time.perf_counter() - started
    draft = receipts[0].draft
    assert draft is not None, "rank 0's receipt holds it"
    outcome = commit.publish(directory, save, draft, receipts, 0, lambda holder: False)
    assert outcome is Published.DONE
    seconds = time.perf_counter() - started
    manifest = os.stat(os.path.join(directory.tag(_SAVE_ID.tag), MANIFEST)).st_size
    return {"ranks": RANKS, "read": read, "committed": seconds, "manifest_bytes": manifest}


def _write_receipt(save: str, rank: int) -> None:
    digest = digest_bytes(str(rank).encode())
    receipt = Receipt(
        name=names.shard_name(rank, RANKS),
        size_bytes=_SHARD_BYTES,
        data_offset=4096,
        header_digest=digest,
        digest=digest,
        save_id=str(_SAVE_ID),
        rank=rank,
        world_size=RANKS,
        seconds=1.0,
        draft=_draft() if rank == 0 else None,
    )
    with open(os.path.join(save, receipt.name), "wb") as file:
        file.truncate(_SHARD_BYTES)
    Path(save, names.receipt_name(rank, RANKS)).write_bytes(receipt.to_bytes())


def _draft() -> dict[str, Any]:
    draft = make_draft(_SAVE_ID, RANKS, _NUMEL, ((0, 0),), None)
    parameters = tuple(
        Parameter(f"model.layers.{i // 9}.part{i % 9}.weight", (_NUMEL,), "BF16", "F32", 0, True)
        for i in range(_PARAMETERS)
    )
    return replace(draft, parameters=parameters).draft_json()
