"""The manifest's draft: what rank 0 says of a save before its shards are on disk.

Everything that is not a tensor goes in here as JSON, through the state tree's list of types; a
value that has no exact form is an error here, before any image is touched.
"""

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.checkpoint.plan import StagingPlan
from engine.checkpoint.zero3 import Layout, LiveState
from engine.format import tree
from engine.format.manifest import Base, Draft, Optimizer, ParamGroup
from engine.format.names import SaveId
from engine.protocol.history import Link

# DeepSpeed's own counters and schedules, by the keys of its model states.
_MODEL_KEYS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
_REFUSED_KEYS = ("data_sampler", "random_ltd")
_ZERO_KEYS = ("dynamic_loss_scale", "overflow")
# Known only when the image is complete.
_LAST_FIELDS = ("staged_at", "stage_seconds")


@dataclass(frozen=True)
class Progress:
    """Where the run stands at a save.

    step           optimizer steps done
    sample_offset  samples consumed by all ranks since the run began
    stream         state of the data stream, JSON
    client_state   the caller's own, equal on all ranks: rank 0's is stored; of the tree's types
    metrics        by name, equal on all ranks; what `keep_best` compares
    """

    step: int
    sample_offset: int
    stream: Any
    client_state: Mapping[str, Any]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Lineage:
    """What the saves of one attempt have in common.

    history         the attempt's own, itself last
    parent_save_id  the save it resumed from; None for a fresh start
    fingerprint     identity of the data, JSON
    """

    history: tuple[Link, ...]
    parent_save_id: str | None
    fingerprint: Any


class DraftWriter:
    """Writes the drafts of one attempt as JSON; encodes once what does not depend on the step."""

    def __init__(
        self, layout: Layout, optimizer_kind: str, lineage: Lineage, base: Base | None = None
    ) -> None:
        self._layout = layout
        self._optimizer_kind = optimizer_kind
        self._lineage = lineage
        self._base = base
        self._parameters = b""

    def prepare(self) -> None:
        """Encode ahead what `begin` would encode once: megabytes, for very many parameters."""
        if not self._parameters:
            described = [parameter.to_json() for parameter in self._layout.parameters]
            base = None if self._base is None else self._base.to_json()
            fields = {"parameters": described, "base": base}
            self._parameters = json.dumps(fields).encode()[1:-1]

    def begin(
        self, save_id: SaveId, plan: StagingPlan, live: LiveState, state: Any, progress: Progress
    ) -> bytes:
        """Return all of a draft but its last fields. `state` is what `encode_state` returned.

        Raises engine.format.errors.FormatError for what has no exact form.
        """
        draft = Draft(
            save_id=str(save_id),
            step=progress.step,
            sample_offset=progress.sample_offset,
            world_size=self._layout.world_size,
            history=tuple((link.attempt, link.from_step) for link in self._lineage.history),
            parent_save_id=self._lineage.parent_save_id,
            stream=progress.stream,
            fingerprint=self._lineage.fingerprint,
            parameters=(),
            whole_entries=plan.structure.whole,
            param_groups=tuple(
                ParamGroup(tree.encode(group, f"param_groups[{i}]"))
                for i, group in enumerate(live.hyperparameters)
            ),
            optimizer=Optimizer(
                self._optimizer_kind, plan.state_keys, live.scalar_runs(self._layout)
            ),
            state=state,
            versions=_versions(),
            staged_at="",
            stage_seconds=0.0,
        )
        self.prepare()
        fields = draft.draft_json()
        for name in ("parameters", "base", *_LAST_FIELDS):
            del fields[name]
        return json.dumps(fields).encode()[:-1] + b", " + self._parameters

    def end(self, begun: bytes, stage_seconds: float) -> bytes:
        """Return the whole draft, staged now. `begun` is what `begin` returned."""
        now = datetime.datetime.now(datetime.timezone.utc)
        values = (now.isoformat(timespec="milliseconds"), stage_seconds)
        last = json.dumps(dict(zip(_LAST_FIELDS, values, strict=True)))
        return begun + b", " + last[1:].encode()


def encode_state(
    model_states: Mapping[str, Any],
    zero_states: Mapping[str, Any],
    progress: Progress,
) -> Any:
    """Return everything else that DeepSpeed and the caller hand over, as a tree.

    Raises engine.format.errors.UnsupportedValueError, which names the path to the value.
    """
    for key in _REFUSED_KEYS:
        if model_states.get(key) is not None:
            raise ValueError(
                f"DeepSpeed's {key} holds state that cannot be saved exactly; switch it off"
            )
    scaler = zero_states["loss_scaler"]
    deepspeed = {
        **{key: model_states[key] for key in _MODEL_KEYS},
        **{key: zero_states[key] for key in _ZERO_KEYS},
        "loss_scaler": {"kind": type(scaler).__name__, **vars(scaler)},
    }
    state = {
        "deepspeed": deepspeed,
        "client_state": dict(progress.client_state),
        "metrics": dict(progress.metrics),
    }
    return tree.encode(state, "state")


@cache
def _versions() -> dict[str, str]:
    distributions = ("torch", "deepspeed", "safetensors", "numpy")
    versions = {name: importlib.metadata.version(name) for name in distributions}
    return {"python": platform.python_version(), **versions}
