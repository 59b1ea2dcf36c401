"""What a rank's shard holds and where each byte of it comes from: planned once, used by each save.

A plan depends on the structure of the state only, not on its values: which flat tensors there are
and of what dtype. So a save compares structures, which are as long as the list of sub-groups, and
all that grows with the number of parameters (entries, offsets, runs of bytes, the header) is made
again only when the structure changes: once, as a rule, when the optimizer makes its state in the
first step. Pure: no tensor is kept, since DeepSpeed may replace or offload them between two saves.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.zero3 import Layout, LiveState, dtype_name
from engine.format.dtypes import ITEMSIZE
from engine.format.layout import entries_of, weight_spans
from engine.format.manifest import StateKey
from engine.format.partition import ranges_of, slice_of
from engine.format.shard import Entry, ShardPlan


@dataclass(frozen=True)
class Structure:
    """What a plan is made from. Equal structures have equal plans, for one layout.

    flats  kind, sub-group and dtype of each flat tensor
    whole  entries that every rank stores whole: buffers, RNG states
    """

    flats: tuple[tuple[str, int, str], ...]
    whole: tuple[Entry, ...]

    @classmethod
    def of(cls, live: LiveState, whole: Mapping[str, torch.Tensor]) -> "Structure":
        """Return the structure of one rank's live state and its `whole` tensors by entry name."""
        flats = tuple(
            (flat.kind, flat.sub_group, dtype_name(flat.tensor.dtype)) for flat in live.flats
        )
        return cls(flats, whole_entries(whole))

    def with_state(self, keys: Sequence[str]) -> "Structure":
        """Return this structure as it will be when every sub-group has the state `keys`, too."""
        present = {(kind, sub_group) for kind, sub_group, _ in self.flats}
        flats: list[tuple[str, int, str]] = []
        for kind, sub_group, dtype in self.flats:
            flats.append((kind, sub_group, dtype))
            if kind == "master":  # first in its sub-group, as `LiveState` has it
                flats += [(k, sub_group, dtype) for k in keys if (k, sub_group) not in present]
        return Structure(tuple(flats), self.whole)


def whole_entries(whole: Mapping[str, torch.Tensor]) -> tuple[Entry, ...]:
    """Return the entries of tensors that every rank stores whole."""
    return tuple(Entry(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in whole.items())


def state_keys_ahead(optimizer_kind: str, hyperparameters: Mapping[str, object]) -> tuple[str, ...]:
    """Return the state that an optimizer of this class will make in its first step, if known.

    It only serves to plan ahead: a wrong answer costs memory, or another plan and new images.
    """
    name = optimizer_kind.rpartition(".")[2]
    if name.endswith(("Adam", "AdamW")):
        return ("exp_avg", "exp_avg_sq")
    if name == "SGD" and hyperparameters.get("momentum"):
        return ("momentum_buffer",)
    return ()


@dataclass(frozen=True)
class Run:
    """Bytes that lie together both in a live tensor and in the image: one copy.

    source      number of the tensor in `Snapshot.tensors`
    begin, end  bytes of it
    target      byte of the image where they go
    """

    source: int
    begin: int
    end: int
    target: int


class StagingPlan:
    """The shard of one rank for one structure.

    Attributes:
        structure: what it was made from.
        state_keys: the optimizer's state per element, as the manifest lists it.
        shard: where every byte of the file lies.
        weights: where its masters lie: bytes [begin, end), one range for each of their dtypes.
        runs: the copies that fill it, in file order. A flat tensor without padding is one run,
            however many slices it has.
        first_whole: sources from this number on are `whole` tensors.
    """

    def __init__(self, layout: Layout, structure: Structure) -> None:
        self.structure = structure
        self.state_keys = _state_keys(layout, structure)
        entries = entries_of(
            layout.parameters,
            self.state_keys,
            structure.whole,
            layout.world_size,
            layout.rank,
            holds_frozen=layout.holds_frozen,
        )
        self.shard = ShardPlan(entries)
        self.weights = weight_spans(self.shard)
        self.first_whole = len(structure.flats) + len(layout.stored_frozen)
        self.runs = tuple(_join(self.shard, slices_of(layout, structure)))


@dataclass(frozen=True)
class Slice:
    """Where the bytes of one entry live: [begin, end) of tensor number `source`."""

    source: int
    begin: int
    end: int


def _state_keys(layout: Layout, structure: Structure) -> tuple[StateKey, ...]:
    owners: dict[tuple[str, str], list[int]] = {}
    for kind, sub_group, dtype in structure.flats:
        if kind != "master":
            indices = owners.setdefault((kind, dtype), [])
            indices.extend(piece.index for piece in layout.sub_groups[sub_group])
    return tuple(
        StateKey(key, dtype, ranges_of(sorted(indices))) for (key, dtype), indices in owners.items()
    )


def slices_of(layout: Layout, structure: Structure) -> dict[str, Slice]:
    """Return where the bytes of every entry are in `Snapshot.tensors`, by its name."""
    slices: dict[str, Slice] = {}
    for number, (kind, sub_group, dtype) in enumerate(structure.flats):
        size = ITEMSIZE[dtype]
        for piece in layout.sub_groups[sub_group]:
            name = f"{kind}/{layout.parameters[piece.index].name}"
            begin = piece.begin * size
            slices[name] = Slice(number, begin, begin + piece.valid * size)
    number = len(structure.flats)
    for parameter in layout.stored_frozen:
        begin, end = slice_of(math.prod(parameter.shape), layout.world_size, layout.rank)
        size = (end - begin) * ITEMSIZE[parameter.dtype]
        slices[f"frozen/{parameter.name}"] = Slice(number, 0, size)
        number += 1
    for entry in structure.whole:
        slices[entry.name] = Slice(number, 0, entry.size_bytes)
        number += 1
    return slices


def _join(shard: ShardPlan, slices: Mapping[str, Slice]) -> Iterator[Run]:
    """Join neighbours of one tensor; leave out what is empty."""
    run: Run | None = None
    for entry in shard.entries:
        piece, (target, stop) = slices[entry.name], shard.spans[entry.name]
        assert stop - target == piece.end - piece.begin, f"{entry.name}: not of this layout"
        if target == stop:
            continue
        if run is not None and (run.source, run.end) == (piece.source, piece.begin):
            run = Run(run.source, run.begin, piece.end, run.target)
            continue
        if run is not None:
            yield run
        run = Run(piece.source, piece.begin, piece.end, target)
    if run is not None:
        yield run
