"""From N ranks to M: which bytes of which shard go where. Pure: no file, no tensor.

Everything is a half-open interval, of elements first and of a shard's bytes then. A rank of M takes
from the shards that hold elements of its slices, which are about N / M of them. Its takes are made
per parameter and state key, never per element.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from engine.format.dtypes import ITEMSIZE
from engine.format.partition import parts_of, slice_of
from engine.format.shard import StoredEntry


class Take(NamedTuple):
    """Elements of one entry of a shard, and where they go.

    shard   the rank whose shard it is
    entry   the entry's name
    begin, size  elements of the entry, flattened: the first, and how many
    target  number of a tensor
    at      its first element there, flattened
    """

    shard: int
    entry: str
    begin: int
    size: int
    target: int
    at: int


class Run(NamedTuple):
    """Bytes that lie together both in a shard's file and in a tensor: [begin, end) of the file."""

    begin: int
    end: int
    target: int
    at: int


def takes_of_slice(
    entry: str, numel: int, saved_by: int, world_size: int, rank: int, target: int, at: int
) -> Iterator[Take]:
    """Yield what makes up the slice of `rank` of `world_size`, in order; nothing if it is empty.

    Args:
        entry: name of the entry that holds a slice of the parameter in each shard.
        numel: elements of the whole parameter.
        saved_by: ranks that the parameter was saved by.
        target, at: where the slice begins.
    """
    first, last = slice_of(numel, world_size, rank)
    for shard, (begin, end) in parts_of(numel, saved_by, first, last):
        stored, _ = slice_of(numel, saved_by, shard)
        yield Take(shard, entry, begin - stored, end - begin, target, at + begin - first)


def runs_of(takes: Iterable[Take], entries: Mapping[str, StoredEntry]) -> list[Run]:
    """Return the bytes that `takes`, all of one shard, read from it: ascending, neighbours joined.

    `entries` are those of the shard's header; every take must lie inside of its entry.
    """
    found = []
    for take in takes:
        entry = entries[take.entry]
        item = ITEMSIZE[entry.dtype]
        begin = entry.begin + take.begin * item
        end = begin + take.size * item
        assert entry.begin <= begin <= end <= entry.end, f"{take}: outside of its entry"
        if begin < end:
            found.append(Run(begin, end, take.target, take.at * item))
    joined: list[Run] = []
    for run in sorted(found):
        last = joined[-1] if joined else None
        if last is not None and run == (
            last.end,
            run.end,
            last.target,
            last.at + last.end - last.begin,
        ):
            joined[-1] = last._replace(end=run.end)
        else:
            joined.append(run)
    return joined


def checkers(saved_by: int, world_size: int) -> list[int]:
    """Return for each shard the rank that checks it: every shard has one, and only one.

    It is the rank that takes most of the shard; among equals the one with the fewest shards so far.
    (Where parameters are smaller than the world a shard may be of no use to it, or to anybody. It
    is checked all the same.)
    """
    loads = [0] * world_size
    chosen = []
    for shard in range(saved_by):
        # A shard is [shard, shard + 1) * world_size of saved_by * world_size units of the state.
        begin, end = shard * world_size, (shard + 1) * world_size
        takers = range(begin // saved_by, (end - 1) // saved_by + 1)
        rank = max(
            takers,
            key=lambda r: (min(end, (r + 1) * saved_by) - max(begin, r * saved_by), -loads[r]),
        )
        loads[rank] += 1
        chosen.append(rank)
    return chosen
