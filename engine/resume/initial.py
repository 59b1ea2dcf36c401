"""Start from weights in the Hugging Face layout: each rank reads its own slices of them.

For a fresh start only, after `deepspeed.initialize` and before the first step. Masters take the
files' values as they are, in the masters' own dtype: fp32 files lose nothing; the training copy is
rounded from the masters, as every step of DeepSpeed does it. Everything is checked by name, shape
and dtype before the first value is changed. Collective; training thread.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from engine.checkpoint.collective import Agreement
from engine.checkpoint.zero3 import Layout
from engine.exchange.errors import ExchangeError
from engine.exchange.pretrained import PretrainedDirectory
from engine.format.dtypes import OF_TORCH_NAME, TORCH_NAME
from engine.format.manifest import Parameter
from engine.format.partition import slice_of

_MAX_LINES = 20
_ERRORS = (ExchangeError, OSError, MemoryError)


def initialize_from(ds_engine: Any, directory: str) -> dict[str, Any]:
    """Give a DeepSpeed ZeRO-3 engine the weights in `directory`. Collective; blocks.

    Args:
        ds_engine: not trained yet. Every parameter and persistent buffer must be in the files, and
            nothing else; of tied weights, one name suffices.
        directory: `model.safetensors`, or shards and their index; the same on all ranks.

    Returns the directory's identity, JSON, to be kept with the run's checkpoints.

    Raises:
        ExchangeError: on all ranks: a name, shape or dtype does not fit (all are listed), or a file
            cannot be read. In the latter case the engine must not be used any more.
    """
    agreement = Agreement()
    loaders: list[_Loader] = []
    _settle(agreement, lambda: loaders.append(_Loader(ds_engine, directory)))
    (loader,) = loaders
    # Small parameters are kept whole on every rank, in copies that would go stale.
    ds_engine.optimizer.checkpoint_event_prologue()
    _settle(agreement, loader.load)
    ds_engine.optimizer.checkpoint_event_epilogue()
    return loader.source.identity


def _settle(agreement: Agreement, action: Any) -> None:
    """Do what may fail on one rank alone, and fail on all of them alike."""
    reason = ""
    try:
        action()
    except _ERRORS as error:
        reason = str(error) or type(error).__name__
    agreement.require(reason, ExchangeError)


class _Loader:
    """One rank's part in it. Everything is checked when it is made."""

    def __init__(self, ds_engine: Any, directory: str) -> None:
        self.source = PretrainedDirectory(directory)
        self._optimizer, self._module = ds_engine.optimizer, ds_engine.module
        self._layout = Layout.of(ds_engine)
        self._buffers = {
            name: self._module.get_buffer(name) for name in ds_engine._get_buffer_names()
        }
        self._stored_as: dict[str, str] = {}
        self._check()

    def load(self) -> None:
        """Read the rank's slices into its partitions."""
        optimizer, layout = self._optimizer, self._layout
        for number, pieces in enumerate(layout.sub_groups):
            masters = optimizer.fp32_partitioned_groups_flat[number]
            for piece in pieces:
                values = self._slice(layout.parameters[piece.index])
                masters.data.narrow(0, piece.begin, piece.valid).copy_(values)
            # The partitions that the model trains with are views of this.
            optimizer.fp16_partitioned_groups_flat[number].data.copy_(masters.data)
        for parameter in layout.frozen:
            values = self._slice(parameter)
            partition = self._module.get_parameter(parameter.name).ds_tensor
            partition.data.narrow(0, 0, values.numel()).copy_(values)
        for name, buffer in self._buffers.items():
            buffer.data.copy_(self._read(name, 0, buffer.numel()).reshape(buffer.shape))

    def _slice(self, parameter: Parameter) -> torch.Tensor:
        numel = torch.Size(parameter.shape).numel()
        return self._read(
            parameter.name, *slice_of(numel, self._layout.world_size, self._layout.rank)
        )

    def _read(self, name: str, first: int, last: int) -> torch.Tensor:
        stored = self._stored_as[name]
        dtype = getattr(torch, TORCH_NAME[self.source.tensors[stored].entry.dtype])
        if first == last:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.source.read(stored, first, last), dtype=dtype)

    def _check(self) -> None:
        """Raise ExchangeError, with all that does not fit."""
        wanted = list(self._wanted())
        left = dict(self.source.tensors)
        lines = []
        for names, shape, dtype in wanted:
            there = [name for name in names if left.pop(name, None) is not None]
            if not there:
                lines.append(f"missing: {' or '.join(names)}, {list(shape)}")
                continue
            self._stored_as[names[0]] = there[0]
            for name in there:
                lines += self._misfits(name, shape, dtype)
            if not lines:
                lines += self._tied_apart(there, shape)
        ignored = getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or []
        for name, located in left.items():
            if not any(re.search(pattern, name) for pattern in ignored):
                lines.append(f"unexpected: {name}, {list(located.entry.shape)}")
        if lines:
            more = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
            raise ExchangeError(
                f"{self.source.path}: holds the weights of another model:\n  "
                + "\n  ".join(lines[:_MAX_LINES] + more)
            )

    def _wanted(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], str]]:
        """Yield names (own first, then aliases), shape and dtype of all that a model must have."""
        for parameter in self._layout.parameters:
            yield (parameter.name, *parameter.aliases), parameter.shape, parameter.dtype
        for name, buffer in self._buffers.items():
            dtype = OF_TORCH_NAME[str(buffer.dtype).removeprefix("torch.")]
            yield (name,), tuple(buffer.shape), dtype

    def _misfits(self, name: str, shape: tuple[int, ...], dtype: str) -> list[str]:
        stored = self.source.tensors[name].entry
        if stored.shape != shape:
            return [f"{name}: {list(stored.shape)} in the files, {list(shape)} in the model"]
        if stored.dtype != dtype and not (_is_floating(stored.dtype) and _is_floating(dtype)):
            return [f"{name}: {stored.dtype} in the files, {dtype} in the model"]
        return []

    def _tied_apart(self, names: list[str], shape: tuple[int, ...]) -> list[str]:
        """Compare, in this rank's slice, what the files hold of one tensor under several names."""
        if len(names) == 1:
            return []
        span = slice_of(torch.Size(shape).numel(), self._layout.world_size, self._layout.rank)
        values = {bytes(self.source.read(name, *span)) for name in names}
        if len(values) > 1:
            return [f"{' and '.join(names)}: one tensor in the model, two in the files"]
        return []


def _is_floating(dtype: str) -> bool:
    kind: torch.dtype = getattr(torch, TORCH_NAME[dtype])
    return bool(kind.is_floating_point)
