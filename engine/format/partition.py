"""Which elements of a parameter a rank owns, and lists of parameters written as ranges.

The split is ZeRO-3's (DeepSpeed 0.19.8, ``zero/partition_parameters.py``): the row-major flattened
parameter in equal pieces of ``ceil(numel / world_size)``; trailing ranks may own less, or nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]
"""A half-open range of indices, [begin, end)."""


def piece_of(numel: int, world_size: int) -> int:
    """Return the elements per rank, padding included: ``ceil(numel / world_size)``."""
    if numel < 0 or world_size < 1:
        raise ValueError(f"numel {numel} and world size {world_size}; wanted >= 0 and >= 1")
    return -(-numel // world_size)


def slice_of(numel: int, world_size: int, rank: int) -> Range:
    """Return [begin, end): the elements of the flattened parameter that `rank` owns."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside of world size {world_size}")
    piece = piece_of(numel, world_size)
    begin = min(rank * piece, numel)
    return begin, min(begin + piece, numel)


def parts_of(numel: int, world_size: int, begin: int, end: int) -> Iterator[tuple[int, Range]]:
    """Yield which rank owns which of the elements [begin, end) of a parameter, ascending.

    Each item is a rank and a range of the flattened parameter's elements; none is empty. Takes time
    in the number of ranks that own some, not in their elements or in the size of the world.
    """
    if not 0 <= begin <= end <= numel:
        raise ValueError(f"elements [{begin}, {end}) of a parameter of {numel}")
    piece = piece_of(numel, world_size)
    while begin < end:
        rank = begin // piece
        stop = min((rank + 1) * piece, end)
        yield rank, (begin, stop)
        begin = stop


def ranges_of(indices: Iterable[int]) -> tuple[Range, ...]:
    """Return the ascending `indices` as the fewest ranges: 0, 1, 2, 5 -> (0, 3), (5, 6)."""
    ranges: list[Range] = []
    for index in indices:
        if ranges and index < ranges[-1][1]:
            raise ValueError(f"index {index} does not ascend")
        if ranges and index == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return tuple(ranges)


def indices_of(ranges: Sequence[Range]) -> Iterable[int]:
    """Yield every index in `ranges`, in order: the inverse of `ranges_of`."""
    for begin, end in ranges:
        yield from range(begin, end)
