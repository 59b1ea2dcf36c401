"""Which entries the shard of a rank has: computed from parameters and world size, never listed."""

import math
from collections.abc import Iterator, Sequence

from engine.format.dtypes import ITEMSIZE
from engine.format.manifest import Draft, Parameter, StateKey
from engine.format.partition import indices_of, slice_of
from engine.format.shard import Entry, ShardPlan


def entries_of(
    parameters: Sequence[Parameter],
    state_keys: Sequence[StateKey],
    whole_entries: Sequence[Entry],
    world_size: int,
    rank: int,
    *,
    holds_frozen: bool = True,
) -> list[Entry]:
    """Return the entries of the shard of `rank`, in the order of the file.

    That is by descending item size; among equals masters and frozen slices in the order of the
    parameters, then the state keys in theirs, then the whole entries. Without `holds_frozen`
    there are no frozen slices.
    """

    def entries() -> Iterator[Entry]:
        for parameter in parameters:
            kind, dtype = "frozen", parameter.dtype
            if parameter.master_dtype is not None:
                kind, dtype = "master", parameter.master_dtype
            elif not holds_frozen:
                continue
            yield slice_entry(kind, parameter, dtype, world_size, rank)
        for key in state_keys:
            for index in indices_of(key.parameters):
                yield slice_entry(key.key, parameters[index], key.dtype, world_size, rank)
        yield from whole_entries

    return sorted(entries(), key=lambda entry: -ITEMSIZE[entry.dtype])


def entries_of_manifest(manifest: Draft, rank: int) -> list[Entry]:
    """Return the entries of the shard of `rank` that `manifest` implies, in file order."""
    return entries_of(
        manifest.parameters,
        manifest.optimizer.state_keys,
        manifest.whole_entries,
        manifest.world_size,
        rank,
        holds_frozen=manifest.base is None,
    )


def slice_entry(kind: str, parameter: Parameter, dtype: str, world_size: int, rank: int) -> Entry:
    """Return the entry for the slice of `parameter` that `rank` owns, one-dimensional."""
    begin, end = slice_of(math.prod(parameter.shape), world_size, rank)
    return Entry(f"{kind}/{parameter.name}", dtype, (end - begin,))


def weight_spans(plan: ShardPlan) -> tuple[tuple[int, int], ...]:
    """Return where the masters lie in a shard: bytes [begin, end), ascending, neighbours joined."""
    spans: list[tuple[int, int]] = []
    for entry in plan.entries:
        begin, end = plan.spans[entry.name]
        if not entry.name.startswith("master/"):
            continue
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return tuple(spans)
