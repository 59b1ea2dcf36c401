"""Read the files of a ZeRO-3 checkpoint that DeepSpeed wrote, and run nothing that is in them.

They are pickles. `torch.load` unpickles with `weights_only`: tensors, plain containers, and what is
on the list below; any other class is refused by its name. The list maps DeepSpeed's few classes to
stand-ins, so DeepSpeed itself is not imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.exchange.errors import ExchangeError

_MODEL_FILE = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_00_model_states\.pt")
_OPTIMIZER_FILES = ("bf16_zero_pp_rank_{}_mp_rank_00", "zero_pp_rank_{}_mp_rank_00")
_MODEL_KEYS = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version"),
)
_ZERO_KEYS = (
    *("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count"),
    *("optimizer_state_dict", "fp32_flat_groups"),
)


class LossScaler:
    """Stands in for DeepSpeed's; holds its attributes."""


class DynamicLossScaler:
    """Stands in for DeepSpeed's; holds its attributes."""


_SAFE_GLOBALS = [
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class RankStates:
    """What one rank saved: `model` as in model_states.pt, `zero` as in optim_states.pt, inside."""

    model: Mapping[str, Any]
    zero: Mapping[str, Any]


class DeepSpeedCheckpoint:
    """One tag of a directory that DeepSpeed's `save_checkpoint` has filled.

    Attributes:
        path: of the tag's directory.
        tag: its name.
        world_size: ranks that saved.
    """

    def __init__(self, directory: str, tag: str | None) -> None:
        """Find the files of `tag`, or of what the file `latest` names.

        Raises:
            ExchangeError: there is no such checkpoint, or not of ZeRO-3, or not of all ranks.
        """
        self.tag = _latest(directory) if tag is None else tag
        self.path = os.path.join(os.path.abspath(directory), self.tag)
        if os.path.basename(self.path) != self.tag or self.tag in ("", ".", ".."):
            raise ExchangeError(f"--tag {self.tag}: wanted the name of a directory in {directory}")
        try:
            names = set(os.listdir(self.path))
        except OSError as error:
            raise ExchangeError(f"{self.path}: cannot be listed: {error.strerror}") from error
        ranks = sorted(int(match[1]) for name in names if (match := _MODEL_FILE.fullmatch(name)))
        if not ranks:
            raise ExchangeError(
                f"{self.path}: wanted zero_pp_rank_<r>_mp_rank_00_model_states.pt, as DeepSpeed "
                "saves under ZeRO-3; there is none"
            )
        self.world_size = len(ranks)
        if ranks != list(range(self.world_size)):
            raise ExchangeError(f"{self.path}: not of all ranks: there are the files of {ranks}")
        self._names = names

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(os.path.getsize(os.path.join(self.path, name)) for name in self._names)

    def load(self, rank: int) -> RankStates:
        """Return what `rank` saved; tensors are mapped from its files, not read yet.

        Raises:
            ExchangeError: a file is missing, damaged, holds what is not on the list, or is not what
                ZeRO-3 at this world size saves.
        """
        model_file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        candidates = [f"{stem.format(rank)}_optim_states.pt" for stem in _OPTIMIZER_FILES]
        zero_file = next((name for name in candidates if name in self._names), None)
        if zero_file is None:
            raise ExchangeError(f"{self.path}: {candidates[-1]} is missing")
        model = _with_keys(
            self._unpickle(model_file), _MODEL_KEYS, os.path.join(self.path, model_file)
        )
        zero = _with_keys(
            self._unpickle(zero_file).get("optimizer_state_dict"),
            _ZERO_KEYS,
            os.path.join(self.path, zero_file),
        )
        found = (zero["zero_stage"], model["dp_world_size"], model["mp_world_size"])
        if found != (3, self.world_size, 1):
            raise ExchangeError(
                f"{os.path.join(self.path, model_file)}: found (ZeRO stage, data-parallel, "
                f"model-parallel world size) {found}, wanted (3, {self.world_size}, 1)"
            )
        return RankStates(model, zero)

    def client_state(self, states: RankStates) -> dict[str, Any]:
        """Return what the caller of `save_checkpoint` gave: DeepSpeed mixes it with its own."""
        return {key: states.model[key] for key in states.model if key not in _OWN_KEYS}

    def _unpickle(self, name: str) -> Mapping[str, Any]:
        path = os.path.join(self.path, name)
        try:
            with torch.serialization.safe_globals(_SAFE_GLOBALS):
                loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # damaged pickles raise anything
            text = str(error).strip().splitlines() or [type(error).__name__]
            refused = next((line for line in text if "Unsupported" in line or "GLOBAL" in line), "")
            raise ExchangeError(f"{path}: cannot be read safely: {refused or text[0]}") from error
        if not isinstance(loaded, dict):
            raise ExchangeError(f"{path}: holds {type(loaded).__name__}, wanted a dict")
        return loaded


# DeepSpeed 0.19.8, engine.py, _save_checkpoint.
_OWN_KEYS = frozenset(
    {
        *_MODEL_KEYS,
        *("optimizer", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("checkpoint_parallel_dimensions", "zero_checkpoint_version", "ds_autotp_config"),
    }
)


def _latest(directory: str) -> str:
    path = os.path.join(directory, "latest")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError as error:
        raise ExchangeError(
            f"{path}: {error.strerror}. Give the directory that DeepSpeed's save_checkpoint was "
            "given, and --tag where there is no file latest"
        ) from error


def _with_keys(states: Any, keys: tuple[str, ...], path: str) -> Mapping[str, Any]:
    found = states if isinstance(states, dict) else {}
    missing = [key for key in keys if key not in found]
    if missing:
        raise ExchangeError(f"{path}: is not what ZeRO-3 saves; it lacks {', '.join(missing)}")
    return found
