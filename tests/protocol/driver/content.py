"""Bytes that say which save of which rank they belong to, as real shards of one parameter."""

import hashlib
import os

from engine.format import names
from engine.format.digest import digest_bytes
from engine.format.directory import open_file, read_manifest
from engine.format.layout import entries_of
from engine.format.manifest import Draft, Manifest, Optimizer, Parameter, ParamGroup
from engine.format.shard import ShardPlan, metadata_of

_PARAMETER = "w"


def _parameters(numel: int) -> tuple[Parameter, ...]:
    return (Parameter(_PARAMETER, (numel,), "BF16", "F32", 0, True),)


def make_draft(
    save_id: names.SaveId,
    world_size: int,
    numel: int,
    history: tuple[tuple[int, int], ...],
    parent_save_id: str | None,
) -> Draft:
    """Describe a save of one fp32 parameter of `numel` elements."""
    step = names.step_of(save_id.tag)
    assert step is not None, "a save id holds a tag"
    return Draft(
        save_id=str(save_id),
        step=step,
        sample_offset=step,
        world_size=world_size,
        history=history,
        parent_save_id=parent_save_id,
        stream=None,
        fingerprint=None,
        parameters=_parameters(numel),
        whole_entries=(),
        param_groups=(ParamGroup({}),),
        optimizer=Optimizer("none", (), ()),
        state={},
        versions={},
        staged_at="2026-01-31T23:59:59+00:00",
        stage_seconds=0.0,
    )


def plan_of(numel: int, world_size: int, rank: int) -> ShardPlan:
    """Plan the shard of `rank`."""
    return ShardPlan(entries_of(_parameters(numel), (), (), world_size, rank))


def pattern(save_id: str, rank: int, size_bytes: int) -> bytes:
    """Return the data bytes of the shard of `rank` in save `save_id`, and of no other."""
    block = hashlib.blake2b(f"{save_id}/{rank}".encode()).digest() * 64
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


class MixedError(AssertionError):
    """A committed tag holds bytes that are not its own."""


def read_whole(tag_directory: str) -> Manifest:
    """Read every byte of a committed tag; return its manifest.

    The directory is opened once, so that its name may come to mean another save meanwhile. Raises
    MixedError for bytes of another save, FileNotFoundError where a file is missing.
    """
    directory = os.open(tag_directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        manifest = read_manifest(directory, tag_directory)
        for rank, record in enumerate(manifest.shards):
            with open(open_file(record.name, directory), "rb") as file:
                data = file.read()
            plan = plan_of(manifest.parameters[0].shape[0], manifest.world_size, rank)
            header = plan.header_bytes(metadata_of(manifest.save_id, rank, manifest.world_size))
            body = pattern(manifest.save_id, rank, plan.size_bytes - plan.data_offset)
            if data != header + body or digest_bytes(data) != record.digest:
                raise MixedError(
                    f"{tag_directory}: {record.name} has bytes that are not those of save "
                    f"{manifest.save_id}, its manifest's"
                )
        return manifest
    finally:
        os.close(directory)
