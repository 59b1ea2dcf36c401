"""Compare the weights of two checkpoints of a run: which parameters moved, and how far.

Whoever's ranks wrote them, both are read a window at a time: the shards of the wider world one
after the other, and beside each the parts of the other's that hold the same elements. Memory does
not grow with the model. One process, numpy, no torch; nothing is written.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.exchange.checkpoint import Piece, StoredWeights, Weight, read_at
from engine.exchange.movement import BUFFER, FROZEN, Moved, between
from engine.format.dtypes import ITEMSIZE
from engine.format.partition import parts_of

WINDOW_ELEMENTS = 1 << 18  # in float64, with what is computed from them, about a core's cache

_COMPLEX = "C64"
_OPEN_SHARDS = 16  # of the narrower world: a slice of the wider one meets two, as a rule

Progress: TypeAlias = Callable[[int], None]
_Pair: TypeAlias = tuple[int, int]  # indices of a weight in the two checkpoints


@dataclass(frozen=True)
class Comparison:
    """What became of all weights.

    before, after  tags, and `steps` theirs
    weights        by relative movement, the largest first
    groups         the same summed by param group; frozen weights and buffers last
    unmatched      weights that cannot be compared, in words: only one has them, or otherwise shaped
    """

    before: str
    after: str
    steps: tuple[int, int]
    weights: Sequence[Moved]
    groups: Sequence[Moved]
    unmatched: Sequence[str]

    @property
    def stands_still(self) -> bool:
        """Whether the step moved, and not one trainable weight did: an alarm."""
        trained = [weight for weight in self.weights if weight.trained]
        moved = any(weight.changed for weight in trained)
        return self.steps[0] != self.steps[1] and bool(trained) and not moved


class _Shards:
    """A checkpoint's shards, a few of them open at a time. A context manager."""

    def __init__(self, stored: StoredWeights) -> None:
        self.stored = stored
        self._open: OrderedDict[int, int] = OrderedDict()

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, rank: int, piece: Piece, first: int, last: int) -> memoryview:
        """Return the elements [first, last) of the flattened weight, all of them in `piece`."""
        if rank not in self._open:
            if len(self._open) == _OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1])
            self._open[rank] = self.stored.open_shard(rank)
        self._open.move_to_end(rank)
        size = ITEMSIZE[self.stored.weights[piece.index].stored]
        begin, end = (piece.begin + (at - piece.first) * size for at in (first, last))
        return read_at(self._open[rank], begin, end)

    def parts(self, index: int, first: int, last: int) -> Iterator[tuple[int, int, memoryview]]:
        """Yield, for each shard with some of the elements [first, last), which, and their bytes."""
        weight = self.stored.weights[index]
        parts: Iterator[tuple[int, tuple[int, int]]] = iter([(0, (first, last))])
        if weight.sliced:
            parts = parts_of(weight.numel, self.stored.manifest.world_size, first, last)
        for rank, (begin, end) in parts:
            (piece,) = self.stored.pieces(rank, range(index, index + 1))
            yield begin, end, self.read(rank, piece, begin, end)


class Compare:
    """One comparison of two open checkpoints."""

    def __init__(self, before: StoredWeights, after: StoredWeights, *, full: bool = True) -> None:
        """Match the weights of both, by name and shape.

        Args:
            full: `run` digests every shard before it compares; else it checks sizes and headers.
        """
        self._before, self._after, self._full = before, after, full
        self._pairs, self._unmatched = _match(before, after)

    @property
    def work_bytes(self) -> int:
        """Bytes that `run` will read: for the digests, and to compare."""
        both = (self._before, self._after)
        compared = sum(
            _size(stored.weights[pair[side]])
            for pair in self._pairs
            for side, stored in enumerate(both)
        )
        return compared + (sum(stored.size_bytes for stored in both) if self._full else 0)

    def run(self, progress: Progress | None = None) -> Comparison:
        """Do it. Blocks until both checkpoints are read.

        Args:
            progress: called with the bytes read since its last call, `work_bytes` in all.

        Raises:
            DamagedError: names every damaged shard of the first that has one.
            ExchangeError: a checkpoint was removed meanwhile, as retention does.
        """
        before, after = self._before, self._after
        for stored in (before, after):
            stored.check(full=self._full, progress=progress)
        found = _described(before, after, self._pairs)
        with _Shards(before) as first, _Shards(after) as second:
            for number, moved, size in self._windows(first, second):
                found[number].add(moved)
                if progress is not None:
                    progress(size)
        return Comparison(
            before.manifest.tag,
            after.manifest.tag,
            (before.manifest.step, after.manifest.step),
            sorted(found, key=lambda one: (-one.relative, -one.changed, one.name)),
            _totals(found),
            self._unmatched,
        )

    def _windows(self, first: _Shards, second: _Shards) -> Iterator[tuple[int, Moved, int]]:
        """Yield, of each window, the number of its pair, what became of it, and its bytes."""
        backwards = first.stored.manifest.world_size < second.stored.manifest.world_size
        wide, narrow = (second, first) if backwards else (first, second)
        for rank in range(wide.stored.manifest.world_size):
            for number, pair in enumerate(self._pairs):
                index, other = reversed(pair) if backwards else pair
                dtypes = wide.stored.weights[index].stored, narrow.stored.weights[other].stored
                for piece, begin, end in _windows_of(wide.stored, rank, index):
                    for start, stop, theirs in narrow.parts(other, begin, end):
                        ours = wide.read(rank, piece, start, stop)
                        sides = [(ours, dtypes[0]), (theirs, dtypes[1])]
                        earlier, later = reversed(sides) if backwards else sides
                        yield number, between(*earlier, *later), len(ours) + len(theirs)


def _windows_of(stored: StoredWeights, rank: int, index: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield the elements of a weight that a rank's shard has, a window at a time."""
    size = ITEMSIZE[stored.weights[index].stored]
    for piece in stored.pieces(rank, range(index, index + 1)):
        last = piece.first + (piece.end - piece.begin) // size
        for begin in range(piece.first, last, WINDOW_ELEMENTS):
            yield piece, begin, min(begin + WINDOW_ELEMENTS, last)


def _match(before: StoredWeights, after: StoredWeights) -> tuple[list[_Pair], list[str]]:
    """Return the pairs of indices of weights that can be compared, and why others cannot."""
    theirs = {weight.name: index for index, weight in enumerate(after.weights)}
    pairs, unmatched = [], []
    for index, weight in enumerate(before.weights):
        other = theirs.pop(weight.name, None)
        if other is None:
            unmatched.append(f"{weight.name}: only in {before.manifest.tag}")
        elif after.weights[other].shape != weight.shape:
            unmatched.append(
                f"{weight.name}: {list(weight.shape)} in {before.manifest.tag}, "
                f"{list(after.weights[other].shape)} in {after.manifest.tag}"
            )
        elif (weight.stored == _COMPLEX) != (after.weights[other].stored == _COMPLEX):
            unmatched.append(f"{weight.name}: complex numbers in one of the two only")
        else:
            pairs.append((index, other))
    unmatched += [f"{name}: only in {after.manifest.tag}" for name in theirs]
    return pairs, unmatched


def _described(before: StoredWeights, after: StoredWeights, pairs: Sequence[_Pair]) -> list[Moved]:
    """Return the records of all pairs, of which nothing has been read yet."""
    earlier = {parameter.name: parameter for parameter in before.manifest.parameters}
    later = {parameter.name: parameter for parameter in after.manifest.parameters}
    found = []
    for _, index in pairs:
        weight = after.weights[index]
        moved = Moved(weight.name, weight.shape)
        if weight.name in later:
            trainable = [
                side[weight.name].trainable for side in (earlier, later) if weight.name in side
            ]
            moved.trained, moved.kept_frozen = all(trainable), not any(trainable)
            group = later[weight.name].group
            moved.group = FROZEN if group is None else group
        found.append(moved)
    return found


def _totals(found: Sequence[Moved]) -> list[Moved]:
    """Sum by param group: numbers first, then frozen weights, then buffers."""
    totals: dict[int | str, Moved] = {}
    for one in found:
        name = f"param group {one.group}" if isinstance(one.group, int) else f"{one.group}"
        totals.setdefault(one.group, Moved(name, group=one.group)).add(one)
    order = [*sorted(group for group in totals if isinstance(group, int)), FROZEN, BUFFER]
    return [totals[group] for group in order if group in totals]


def _size(weight: Weight) -> int:
    return weight.numel * ITEMSIZE[weight.stored]
