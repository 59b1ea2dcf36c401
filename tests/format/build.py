"""Build a small valid checkpoint with the format package alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.format import names
from engine.format.digest import digest_bytes
from engine.format.layout import entries_of_manifest
from engine.format.manifest import (
    Draft,
    Manifest,
    Optimizer,
    Parameter,
    ParamGroup,
    Receipt,
    ScalarRun,
    StateKey,
)
from engine.format.shard import Entry, ShardPlan, metadata_of

WORLD_SIZE = 3
STEP = 400
SAVE_ID = "a0007.s0012.global_step400.5ca1ab1e"

PARAMETERS = (
    Parameter("embed.weight", (5, 3), "BF16", "F32", 0, True, ("head.weight",)),
    Parameter("norm.weight", (4,), "F32", "F32", 1, True),
    Parameter("one.bias", (1,), "BF16", "F32", 1, True),
    Parameter("base.weight", (2, 2), "BF16", None, None, False),
)
WHOLE_ENTRIES = (
    Entry("buffer/steps_seen", "I64", ()),
    Entry("buffer/running_mean", "F32", (2,)),
    Entry("rng/torch", "U8", (16,)),
)


def draft(world_size: int = WORLD_SIZE, save_id: str = SAVE_ID) -> Draft:
    """Return a draft that has something in every field."""
    step = names.step_of(names.SaveId.parse(save_id).tag)
    assert step is not None
    return Draft(
        save_id=save_id,
        step=step,
        sample_offset=12800,
        world_size=world_size,
        history=((0, 0), (names.SaveId.parse(save_id).attempt, 250)),
        parent_save_id="a0000.s0005.global_step250.5ca1ab1e",
        stream={"sample_offset": 12800},
        fingerprint={"components": [{"name": "text", "digest": "00"}]},
        parameters=PARAMETERS,
        whole_entries=WHOLE_ENTRIES,
        param_groups=(ParamGroup({"lr": 1e-3}), ParamGroup({"lr": 1e-3, "weight_decay": 0.0})),
        optimizer=Optimizer(
            "torch.optim.adamw.AdamW",
            (StateKey("exp_avg", "F32", ((0, 3),)), StateKey("exp_avg_sq", "F32", ((0, 3),))),
            (ScalarRun((0, 3), {"step": 400.0}),),
        ),
        state={"client_state": {}},
        versions={"everstep": "0.1.0", "torch": "2.13.0"},
        staged_at="2026-01-31T23:59:59+00:00",
        stage_seconds=0.25,
    )


def shard_bytes(of: Draft, rank: int, values: Mapping[str, bytes] | None = None) -> bytes:
    """Return a whole shard; an entry that `values` does not give is filled by its number."""
    plan = ShardPlan(entries_of_manifest(of, rank))
    data = bytearray(plan.header_bytes(metadata_of(of.save_id, rank, of.world_size)))
    for number, entry in enumerate(plan.entries):
        data += (values or {}).get(entry.name, bytes([number + 1]) * entry.size_bytes)
    assert len(data) == plan.size_bytes
    return bytes(data)


def receipt(of: Draft, rank: int, shard: bytes) -> Receipt:
    """Return the receipt for `shard`."""
    data_offset = ShardPlan(entries_of_manifest(of, rank)).data_offset
    return Receipt(
        name=names.shard_name(rank, of.world_size),
        size_bytes=len(shard),
        data_offset=data_offset,
        header_digest=digest_bytes(shard[:data_offset]),
        digest=digest_bytes(shard),
        save_id=of.save_id,
        rank=rank,
        world_size=of.world_size,
        seconds=1.5,
        draft=of.draft_json() if rank == 0 else None,
    )


def checkpoint(
    root: Path,
    of: Draft | None = None,
    values: Sequence[Mapping[str, bytes]] | None = None,
) -> Path:
    """Write a committed checkpoint under `root` and return its tag's directory.

    `values` are those of the entries, for each rank; as for `shard_bytes`.
    """
    of = of or draft()
    directory = root / of.tag
    directory.mkdir(parents=True)
    receipts = []
    for rank in range(of.world_size):
        shard = shard_bytes(of, rank, values[rank] if values else None)
        receipts.append(receipt(of, rank, shard))
        (directory / receipts[-1].name).write_bytes(shard)
        (directory / names.receipt_name(rank, of.world_size)).write_bytes(receipts[-1].to_bytes())
    manifest = Manifest.from_draft(of.draft_json(), receipts)
    (directory / names.MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return directory


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file; a negative `byte` counts from its end."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)
