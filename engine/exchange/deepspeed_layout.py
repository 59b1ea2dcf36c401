"""What a rank of a DeepSpeed checkpoint holds, in the terms of our own format. Pure.

DeepSpeed's load checks nothing, and its files say nothing twice; so here every flat tensor's length
is compared with what shapes and world size imply, on every rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.plan import StagingPlan, Structure, slices_of
from engine.checkpoint.zero3 import Layout, LiveState, Piece, buffers, dtype_name
from engine.exchange.deepspeed_files import RankStates
from engine.exchange.errors import ExchangeError
from engine.format.manifest import Parameter
from engine.format.partition import piece_of, slice_of


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint.

    layout  how its partitions are laid out
    live    its tensors and settings
    plan    the shard they become
    """

    layout: Layout
    live: LiveState
    plan: StagingPlan
    _tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, states: RankStates, rank: int, world_size: int, aliases: Mapping[str, str]
    ) -> "Part":
        """Take one rank's states apart.

        Args:
            aliases: other names of tied parameters, and what they are tied to; rank 0 knows.

        Raises:
            ExchangeError: they are not what ZeRO-3 holds at this world size.
        """
        try:
            layout = _layout_of(states, rank, world_size, aliases)
            _check_lengths(states, layout, rank)
            live = LiveState.of(layout, states.model, states.zero)
            whole = buffers(states.model)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ExchangeError(
                f"rank {rank}: its files do not fit together: {type(error).__name__}: {error}"
            ) from error
        plan = StagingPlan(layout, Structure.of(live, whole))
        tensors = (*(flat.tensor for flat in live.flats), *live.frozen, *whole.values())
        return cls(layout, live, plan, tensors)

    def contents(self) -> Iterator[memoryview]:
        """Yield the bytes of the shard's data, entry by entry, in file order."""
        slices = slices_of(self.layout, self.plan.structure)
        for entry in self.plan.shard.entries:
            piece = slices[entry.name]
            flat = self._tensors[piece.source].detach().reshape(-1).view(torch.uint8)
            yield memoryview(flat[piece.begin : piece.end].numpy())


def _layout_of(
    states: RankStates, rank: int, world_size: int, aliases: Mapping[str, str]
) -> Layout:
    model, packed = states.model, states.zero["optimizer_state_dict"]
    if model["frozen_param_shapes"] is None:
        raise ExchangeError(
            "it was saved with exclude_frozen_parameters: the frozen parameters are not in it. "
            "Save it once more without"
        )
    groups = _groups_of(packed["param_groups"], len(model["param_shapes"]))
    also: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        also.setdefault(name, []).append(alias)

    def describe(name: str, shape: torch.Size, master: str | None, group: int | None) -> Parameter:
        dtype = dtype_name(model["module"][name].dtype)
        names = tuple(also.get(name, ()))
        return Parameter(name, tuple(shape), dtype, master, group, group is not None, names)

    parameters: list[Parameter] = []
    sub_groups = []
    for number, shapes in enumerate(model["param_shapes"]):
        master = dtype_name(states.zero["fp32_flat_groups"][number].dtype)
        pieces, begin = [], 0
        for name, shape in shapes.items():
            first, last = slice_of(shape.numel(), world_size, rank)
            pieces.append(Piece(len(parameters), begin, last - first))
            begin += piece_of(shape.numel(), world_size)
            parameters.append(describe(name, shape, master, groups[number]))
        sub_groups.append(tuple(pieces))
    for name, shape in model["frozen_param_shapes"].items():
        if shape.numel() > 0:
            parameters.append(describe(name, shape, None, None))
    return Layout(tuple(parameters), tuple(sub_groups), groups, rank, world_size)


def _groups_of(param_groups: list[dict[str, Any]], sub_groups: int) -> tuple[int, ...]:
    """Return the param group of each sub-group: torch's packed form lists their numbers."""
    groups = {}
    for group, settings in enumerate(param_groups):
        groups.update(dict.fromkeys(settings["params"], group))
    if sorted(groups) != list(range(sub_groups)):
        raise ExchangeError(
            f"its optimizer has state of the sub-groups {sorted(groups)}, its model {sub_groups}"
        )
    return tuple(groups[number] for number in range(sub_groups))


def _check_lengths(states: RankStates, layout: Layout, rank: int) -> None:
    """Raise ExchangeError unless every flat tensor is as long as the layout says."""
    flats, packed = states.zero["fp32_flat_groups"], states.zero["optimizer_state_dict"]
    if len(flats) != len(layout.sub_groups):
        raise ExchangeError(f"{len(flats)} flat groups for {len(layout.sub_groups)} sub-groups")
    for number, master in enumerate(flats):
        wanted = layout.flat_numel(number)
        state = packed["state"].get(number, {})
        tensors = {"fp32_flat_groups": master} | {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        for key, tensor in tensors.items():
            if tuple(tensor.shape) != (wanted,):
                raise ExchangeError(
                    f"rank {rank}, sub-group {number}: {key} has shape {list(tensor.shape)}, "
                    f"wanted [{wanted}]"
                )
    fragments = states.model["frozen_param_fragments"]
    for parameter in layout.frozen:
        wanted = piece_of(torch.Size(parameter.shape).numel(), layout.world_size)
        found = fragments[parameter.name].numel() if parameter.name in fragments else None
        if found != wanted:
            raise ExchangeError(f"rank {rank}: {parameter.name} has {found} elements of {wanted}")
