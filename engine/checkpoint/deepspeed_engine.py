"""The DeepSpeed checkpoint engine: takes references when DeepSpeed saves, hands out when it loads.

DeepSpeed (0.19.8) calls a checkpoint engine between barriers, so nothing here may raise on one rank
alone, touch a file, or take long. Saving collects the two state dicts by reference; the
checkpointer stages them after DeepSpeed has returned, on the same thread, before `save` returns.
Loading hands out what `engine.resume` has prepared and checked.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from engine.checkpoint.errors import CheckpointError
from engine.protocol.layout import MANIFEST

StateDict = dict[str, Any]


@dataclass
class StateDicts:
    """The two state dicts of one rank, as DeepSpeed names them.

    model   what it would write to *_model_states.pt
    optimizer  what it would write to *_optim_states.pt
    """

    model: StateDict
    optimizer: StateDict


class EverstepCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed is untyped
    """Collects on save, hands out on load. One per DeepSpeed engine; training thread only."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "everstep"
        self._collected: dict[str, StateDict] | None = None
        self._prepared: StateDicts | None = None
        self.before_step: Callable[[], None] | None = None
        """Called right before each step changes the parameters, where copies may be under way."""

    @contextmanager
    def collecting(self) -> Iterator[dict[str, StateDict]]:
        """While open, DeepSpeed may save; yields what it saves: "model" and "optimizer"."""
        self._collected = {}
        try:
            yield self._collected
        finally:
            self._collected = None

    @contextmanager
    def handing_out(self, states: StateDicts) -> Iterator[None]:
        """While open, DeepSpeed may load, and gets `states`."""
        self._prepared = states
        try:
            yield
        finally:
            self._prepared = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Refuse saves that were not begun by the checkpointer: on every rank alike."""
        if self._collected is None:
            raise CheckpointError(
                f"DeepSpeed was asked to save {info.tag!r} directly. Use checkpointer.save(...): "
                "it stages, writes and commits what DeepSpeed hands over"
            )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the writer makes the directories of a save."""

    def save(self, state_dict: StateDict, path: str) -> None:
        """Keep a reference to `state_dict`. `path` is DeepSpeed's name for it, and is not used."""
        assert self._collected is not None, "create() comes first"
        kind = "optimizer" if "optimizer_state_dict" in state_dict else "model"
        self._collected[kind] = state_dict

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: a save commits when every rank's shard is durable."""
        return True

    def is_decoupled(self) -> bool:
        """Ask DeepSpeed to look in before each step, by `get_commit_info`."""
        return self.before_step is not None

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Hold the step until copies are complete; there is nothing for DeepSpeed to commit.

        DeepSpeed 0.19.8 asks at each accumulation boundary, just before the parameters change, and
        does no more when it gets None.
        """
        if self.before_step is not None:
            self.before_step()
        return None

    def load(self, path: str, map_location: Any = None) -> StateDict:
        """Return the prepared state dict that `path` is DeepSpeed's name for."""
        if self._prepared is None:
            raise CheckpointError(
                f"DeepSpeed was asked to load {path!r} directly. Use checkpointer.resume(...)"
            )
        if path.endswith("optim_states.pt"):
            return self._prepared.optimizer
        return self._prepared.model


def install(ds_engine: Any) -> EverstepCheckpointEngine:
    """Replace the checkpoint engine of a DeepSpeed engine, and what it would write beside it."""
    engine = EverstepCheckpointEngine()
    ds_engine.checkpoint_engine = engine
    # Its groups hold parameters only while it steps, saves or loads. DeepSpeed 0.19.8 makes torch's
    # Adagrad a second time and leaves that one's full: it would save each twice, and load none.
    ds_engine.optimizer._clear_fp32_optimizer_param_groups()
    # Rank 0 copies zero_to_fp32.py into the directory at every save; there is no directory.
    ds_engine._copy_recovery_script = lambda save_path: None
    # Two collectives per save, to compare tags that come from step numbers.
    ds_engine._checkpoint_tag_validation = lambda tag: None
    # Loading globs for a file of its own, and asserts that it exists. What it reads comes from
    # `load`, so any file of the checkpoint serves.
    ds_engine._get_all_ckpt_names = lambda directory, tag: [os.path.join(directory, tag, MANIFEST)]
    return engine
