"""What a live DeepSpeed ZeRO-3 engine holds, by parameter name.

The one place that knows how ZeRO-3 lays out its partitions (DeepSpeed 0.19.8, `zero/stage3.py` and
`zero/partition_parameters.py`): each sub-group of parameters is one flat tensor per rank, the
concatenation of every parameter's piece of `ceil(numel / world_size)` elements, padded per
parameter at its end by uninitialised memory. Sub-group boundaries depend on the world size, so all
that is stored goes by the parameter's name.

Nothing here is collective, and nothing is copied.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.errors import RefusedError
from engine.format.dtypes import OF_TORCH_NAME
from engine.format.manifest import Parameter, ScalarRun
from engine.format.partition import piece_of, slice_of
from engine.format.tree import encode


@dataclass(frozen=True)
class Piece:
    """A parameter's place in the flat tensors of its sub-group, on this rank.

    index   of the parameter in the layout order
    begin   of the piece in the flat tensor, in elements
    valid   elements of the piece that are the parameter's; the rest of it is padding
    """

    index: int
    begin: int
    valid: int


@dataclass(frozen=True)
class Layout:
    """How one rank's partitions are laid out; fixed for the life of an engine.

    parameters  the optimizer's in layout order, then the frozen ones
    sub_groups  the pieces of each flat tensor, in order
    groups      the param group of each sub-group
    rank, world_size  in the data-parallel group
    holds_frozen  whether shards hold the frozen parameters
    """

    parameters: tuple[Parameter, ...]
    sub_groups: tuple[tuple[Piece, ...], ...]
    groups: tuple[int, ...]
    rank: int
    world_size: int
    holds_frozen: bool = True

    @classmethod
    def of(cls, ds_engine: Any, *, holds_frozen: bool = True) -> "Layout":
        """Read the layout of a DeepSpeed engine. Raises RefusedError for what cannot be saved."""
        refuse_unsupported(ds_engine)
        optimizer = ds_engine.optimizer
        rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
        world_size = torch.distributed.get_world_size(group=optimizer.dp_process_group)
        aliases = _aliases(ds_engine.module)
        parameters: list[Parameter] = []
        sub_groups = []
        for sub_group_id, members in enumerate(optimizer.fp16_groups):
            group = int(optimizer.sub_group_to_group_id[sub_group_id])
            master = dtype_name(optimizer.fp32_partitioned_groups_flat[sub_group_id].dtype)
            pieces, begin = [], 0
            for member in members:
                first, last = slice_of(member.ds_numel, world_size, rank)
                pieces.append(Piece(len(parameters), begin, last - first))
                begin += piece_of(member.ds_numel, world_size)
                name = ds_engine.param_names[member]
                parameters.append(_describe(name, member, aliases, master, group))
            sub_groups.append(tuple(pieces))
        for name, parameter in ds_engine.module.named_parameters():
            if not (parameter.requires_grad and parameter.ds_numel > 0):
                parameters.append(_describe(name, parameter, aliases, None, None))
        groups = tuple(int(group) for group in optimizer.sub_group_to_group_id.values())
        return cls(tuple(parameters), tuple(sub_groups), groups, rank, world_size, holds_frozen)

    def flat_numel(self, sub_group: int) -> int:
        """Elements of a sub-group's flat tensor, padding included; equal on all ranks."""
        return sum(
            piece_of(math.prod(self.parameters[piece.index].shape), self.world_size)
            for piece in self.sub_groups[sub_group]
        )

    @property
    def frozen(self) -> Iterator[Parameter]:
        """The frozen parameters, in order."""
        return (parameter for parameter in self.parameters if not parameter.trainable)

    @property
    def stored_frozen(self) -> tuple[Parameter, ...]:
        """The frozen parameters that shards hold, in order."""
        return tuple(self.frozen) if self.holds_frozen else ()


@dataclass(frozen=True)
class Flat:
    """One live flat tensor of a sub-group: its masters, or one kind of its optimizer state.

    kind  `master`, or the optimizer's own key; the first part of the names of its entries
    """

    kind: str
    sub_group: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class LiveState:
    """The live tensors of one rank, and the optimizer's settings. All by reference.

    flats            of every sub-group
    frozen           this rank's piece of each frozen parameter that is stored, in order
    scalars          for each sub-group the optimizer state that has no element per parameter's
    hyperparameters  for each param group
    """

    flats: tuple[Flat, ...]
    frozen: tuple[torch.Tensor, ...]
    scalars: tuple[dict[str, Any], ...]
    hyperparameters: tuple[dict[str, Any], ...]

    @classmethod
    def of(
        cls, layout: Layout, model_states: Mapping[str, Any], zero_states: Mapping[str, Any]
    ) -> "LiveState":
        """Name the tensors in the two state dicts that DeepSpeed hands to its checkpoint engine.

        `model_states` is the one of model_states.pt, `zero_states` the `optimizer_state_dict` of
        optim_states.pt. Work grows with sub-groups and frozen parameters, not with parameters.
        """
        packed = zero_states["optimizer_state_dict"]
        flats: list[Flat] = []
        scalars: list[dict[str, Any]] = []
        for sub_group, state in enumerate(states_by_sub_group(layout, packed)):
            master = zero_states["fp32_flat_groups"][sub_group]
            flats.append(Flat("master", sub_group, master))
            scalars.append({})
            for key, value in state.items():
                if is_per_element(value, master):
                    flats.append(Flat(key, sub_group, value))
                else:
                    scalars[-1][key] = value
        fragments = model_states["frozen_param_fragments"]  # None where all are excluded
        return cls(
            tuple(flats),
            tuple(fragments[parameter.name].reshape(-1) for parameter in layout.stored_frozen),
            tuple(scalars),
            tuple(
                {key: value for key, value in group.items() if key != "params"}
                for group in packed["param_groups"]
            ),
        )

    def scalar_runs(self, layout: Layout) -> tuple[ScalarRun, ...]:
        """Return the scalars by parameter. Equal neighbours are one run: Adam's step is.

        Raises engine.format.errors.UnsupportedValueError, which names the path to the value.
        """
        runs: list[ScalarRun] = []
        for pieces, values in zip(layout.sub_groups, self.scalars, strict=True):
            if not values or not pieces:
                continue
            encoded = encode(values, "optimizer state")
            begin, end = pieces[0].index, pieces[-1].index + 1
            if runs and runs[-1].parameters[1] == begin and runs[-1].values == encoded:
                begin = runs.pop().parameters[0]
            runs.append(ScalarRun((begin, end), encoded))
        return tuple(runs)


def states_by_sub_group(layout: Layout, packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each sub-group's entry of torch's packed optimizer state, {} where it has none."""
    states: list[dict[str, Any]] = [{} for _ in layout.sub_groups]
    members: list[list[int]] = [[] for _ in packed["param_groups"]]
    for sub_group, group in enumerate(layout.groups):
        members[group].append(sub_group)
    for sub_groups, packed_group in zip(members, packed["param_groups"], strict=True):
        for sub_group, key in zip(sub_groups, packed_group["params"], strict=True):
            states[sub_group] = packed["state"].get(key, {})
    return states


def is_per_element(value: object, flat: torch.Tensor) -> bool:
    """Tell whether an optimizer state value has one element per element of its flat tensor."""
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def buffers(model_states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the persistent buffers in DeepSpeed's model states, by entry name."""
    names = model_states["buffer_names"]
    return {f"buffer/{name}": model_states["module"][name] for name in names}


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a torch dtype. Raises RefusedError if it has none."""
    name = str(dtype).removeprefix("torch.")
    if name not in OF_TORCH_NAME:
        raise RefusedError(f"tensors of dtype {dtype} cannot be stored in a safetensors shard")
    return OF_TORCH_NAME[name]


def optimizer_kind(ds_engine: Any) -> str:
    """Return the qualified class name of the optimizer that DeepSpeed steps."""
    kind = type(ds_engine.optimizer.optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_unsupported(ds_engine: Any) -> None:
    """Raise RefusedError, which names the setting, for state that DeepSpeed keeps to itself."""
    zero = ds_engine._config.zero_config
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    reasons = {
        f"zero_optimization.stage is {int(zero.stage)}, wanted 3": int(zero.stage) != 3,
        "zero_optimization.offload_optimizer.device is nvme": _is_on_nvme(optimizer),
        "zero_optimization.offload_param.device is nvme": _is_on_nvme(parameters),
        "zero_optimization.offload_optimizer.ratio is below 1 (Twin-Flow)": (
            optimizer is not None and optimizer.ratio < 1
        ),
        "zero_optimization.offload_optimizer.super_offload is on": (
            optimizer is not None and optimizer.super_offload
        ),
        "zero_optimization.zenflow is on": zero.zenflow is not None,
        "zero_optimization.zero_quantized_nontrainable_weights is on": (
            zero.zero_quantized_nontrainable_weights
        ),
        "the model has mixture-of-experts layers": ds_engine.has_moe_layers,
        "pipeline parallelism is on": ds_engine.pipeline_parallelism,
        "tensor parallelism is on (tensor_parallel, or an mpu)": ds_engine.mp_world_size > 1,
    }
    found = next((reason for reason, is_found in reasons.items() if is_found), None)
    if found is None and _loses_param_groups(ds_engine):  # which only ZeRO-3 can be asked
        found = "DeepSpeed keeps only the first of Adagrad's param groups"
    if found is not None:
        raise RefusedError(
            f"{found}: that state cannot be saved and resumed yet. Change this setting"
        )


def _is_on_nvme(offload: Any) -> bool:
    return offload is not None and str(offload.device) == "nvme"


def _loses_param_groups(ds_engine: Any) -> bool:
    """Tell whether the optimizer has fewer groups than the engine was given (Adagrad, 0.19.8)."""
    groups = ds_engine.optimizer.sub_group_to_group_id.values()
    return len(set(groups)) > len(ds_engine.optimizer.optimizer.param_groups)


def _describe(
    name: str,
    parameter: Any,
    aliases: Mapping[int, list[str]],
    master: str | None,
    group: int | None,
) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(parameter.ds_shape),
        dtype=dtype_name(parameter.dtype),
        master_dtype=master,
        group=group,
        trainable=group is not None,
        aliases=tuple(alias for alias in aliases.get(id(parameter), []) if alias != name),
    )


def _aliases(module: torch.nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
