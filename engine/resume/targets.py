"""The tensors that a rank's part of a checkpoint is read into, in the shape that DeepSpeed takes.

Made from the manifest and the live layout, which may cut and group the parameters otherwise than
the run that saved them: slices and sub-groups follow the live layout, and what is stored is found
by the parameter's name. What cannot be laid out so is refused here, before a byte is read.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.checkpoint.zero3 import Layout, Piece
from engine.format.dtypes import TORCH_NAME
from engine.format.manifest import Manifest
from engine.format.partition import indices_of, piece_of
from engine.format.sealed import JSON
from engine.resume.errors import MismatchError
from engine.resume.reshard import Take, takes_of_slice

MASTER = "master"


@dataclass
class Targets:
    """Tensors to be filled, on the CPU, and what fills them.

    flats    by sub-group and kind, as long as the sub-group's flat tensor; padding is zero
    scalars  of each sub-group: the optimizer's other state as a tree, None where it has none
    frozen   by parameter, as long as a piece; padding is zero. Empty where shards hold none
    whole    buffers and generators by entry name
    tensors  all of the above, as the takes number them
    takes    what is to be read: together all of every tensor but its padding
    """

    flats: list[dict[str, torch.Tensor]] = field(default_factory=list)
    scalars: list[JSON] = field(default_factory=list)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: Manifest, layout: Layout, whole: Iterable[str]) -> "Targets":
        """Allocate what the rank of `layout` takes from the checkpoint. Nothing is read.

        Args:
            manifest: has the layout's parameters; `engine.resume.validate` has checked it.
            whole: the entries that every shard has whole and that are wanted. They come from the
                rank's own shard, at another world size from that of rank 0.

        Raises:
            MismatchError: one sub-group of this run has parameters whose optimizer state differs in
                what a sub-group has once.
        """
        targets = cls()
        targets._add_sub_groups(_Stored(manifest), layout)
        if manifest.base is None:
            targets._add_frozen(manifest, layout)
        own = layout.rank if manifest.world_size == layout.world_size else 0
        wanted = set(whole)
        for entry in manifest.whole_entries:
            if entry.name in wanted:
                tensor = torch.empty(entry.shape, dtype=_dtype(entry.dtype))
                targets.whole[entry.name] = tensor
                take = Take(own, entry.name, 0, tensor.numel(), targets._number(tensor), 0)
                targets.takes.append(take)
        return targets

    def _add_sub_groups(self, stored: "_Stored", layout: Layout) -> None:
        for sub_group, pieces in enumerate(layout.sub_groups):
            names = [layout.parameters[piece.index].name for piece in pieces]
            self.scalars.append(stored.scalars_of(names))
            flats: dict[str, torch.Tensor] = {}
            for kind, dtype in stored.kinds_of(names).items():
                flats[kind] = torch.empty(layout.flat_numel(sub_group), dtype=_dtype(dtype))
                self._take_pieces(kind, flats[kind], pieces, stored.world_size, layout)
            self.flats.append(flats)

    def _take_pieces(
        self,
        kind: str,
        flat: torch.Tensor,
        pieces: Sequence[Piece],
        saved_by: int,
        layout: Layout,
    ) -> None:
        target = self._number(flat)
        for piece in pieces:
            parameter = layout.parameters[piece.index]
            numel = math.prod(parameter.shape)
            self.takes += takes_of_slice(
                f"{kind}/{parameter.name}",
                numel,
                saved_by,
                layout.world_size,
                layout.rank,
                target,
                piece.begin,
            )
            length = piece_of(numel, layout.world_size)
            if piece.valid < length:
                flat[piece.begin + piece.valid : piece.begin + length] = 0

    def _add_frozen(self, manifest: Manifest, layout: Layout) -> None:
        dtypes = {p.name: p.dtype for p in manifest.parameters}
        for parameter in layout.frozen:
            numel = math.prod(parameter.shape)
            length = piece_of(numel, layout.world_size)
            fragment = torch.zeros(length, dtype=_dtype(dtypes[parameter.name]))
            self.frozen[parameter.name] = fragment
            self.takes += takes_of_slice(
                f"frozen/{parameter.name}",
                numel,
                manifest.world_size,
                layout.world_size,
                layout.rank,
                self._number(fragment),
                0,
            )

    def _number(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class _Stored:
    """What a manifest says of the optimizer's state, by the parameters' names."""

    def __init__(self, manifest: Manifest) -> None:
        names = [parameter.name for parameter in manifest.parameters]
        self.world_size = manifest.world_size
        self._kinds: dict[str, dict[str, str]] = {name: {} for name in names}
        for parameter in manifest.parameters:
            if parameter.master_dtype is not None:
                self._kinds[parameter.name][MASTER] = parameter.master_dtype
        for key in manifest.optimizer.state_keys:
            for index in indices_of(key.parameters):
                self._kinds[names[index]][key.key] = key.dtype
        self._scalars: dict[str, JSON] = {}
        for run in manifest.optimizer.scalars:
            self._scalars.update(dict.fromkeys(names[slice(*run.parameters)], run.values))

    def kinds_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return the dtype of each kind of entry that the parameters of a sub-group have."""
        kinds = [self._kinds[name] for name in names]
        _require_equal(names, kinds)
        return kinds[0]

    def scalars_of(self, names: Sequence[str]) -> JSON:
        """Return the optimizer's other state that the parameters of a sub-group have."""
        scalars = [self._scalars.get(name) for name in names]
        _require_equal(names, scalars)
        return scalars[0]


def _require_equal(names: Sequence[str], values: Sequence[Any]) -> None:
    """A flat tensor has one dtype and one step, so its parameters must agree on them."""
    for name, value in zip(names, values, strict=True):
        if value != values[0]:
            raise MismatchError(
                "this run keeps parameters in one sub-group whose optimizer state differs in the "
                f"checkpoint:\n    {names[0]}: {values[0]}\n    {name}: {value}\n"
                "Restore the deepspeed.zero_optimization.sub_group_size that it was saved with"
            )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, TORCH_NAME[name])
    return dtype
