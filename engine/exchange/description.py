"""What the manifest of an imported checkpoint says, as DeepSpeed's files and the user have it.

Pure. What the files hold and the manifest cannot is a note for people, not a silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.draft import Progress, encode_state
from engine.exchange.deepspeed_files import DeepSpeedCheckpoint, RankStates
from engine.exchange.errors import ExchangeError
from engine.format import tree
from engine.format.errors import FormatError, UnsupportedValueError
from engine.format.names import tag_of

IMPORTED_FROM = "imported_from"
"""Key of the manifest's fingerprint, which says nothing of data or settings then."""


@dataclass(frozen=True)
class Options:
    """What DeepSpeed's files do not say.

    sample_offset   samples consumed by all ranks; DeepSpeed's own count unless given
    optimizer_kind  qualified class name; found from DeepSpeed's configuration unless given
    """

    sample_offset: int | None = None
    optimizer_kind: str | None = None


@dataclass(frozen=True)
class Description:
    """What the manifest is to say, as rank 0's files have it.

    aliases  other names of tied parameters, and what they are tied to
    state    the manifest's tree of that name
    notes    lines for people to know
    """

    tag: str
    progress: Progress
    optimizer_kind: str
    fingerprint: Mapping[str, Any]
    aliases: Mapping[str, str]
    state: Any
    notes: tuple[str, ...]

    @classmethod
    def of(cls, source: DeepSpeedCheckpoint, states: RankStates, options: Options) -> "Description":
        model = states.model
        client_state, dropped = _storable(source.client_state(states))
        offset = options.sample_offset
        notes = [
            f"not stored, and so not imported: client state {key}: {why}"
            for key, why in dropped.items()
        ]
        if offset is None:
            offset = model["global_samples"]
            notes.append(f"the sample offset is DeepSpeed's own count, {offset}")
        notes.append(
            "DeepSpeed stores no random generators: a run that resumes keeps those it started with"
        )
        progress = Progress(model["global_steps"], offset, None, client_state, {})
        try:
            state = encode_state(model, states.zero, progress)
        except (FormatError, ValueError) as error:
            raise ExchangeError(f"{source.path}: {error}") from error
        return cls(
            tag_of(model["global_steps"]),
            progress,
            options.optimizer_kind or _optimizer_kind(model["ds_config"]),
            {
                IMPORTED_FROM: {
                    "directory": source.path,
                    "deepspeed_version": str(model["ds_version"]),
                }
            },
            model["shared_params"],
            state,
            tuple(notes),
        )


def _storable(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what of a client state can be stored, and why the rest cannot."""
    kept, dropped = {}, {}
    for key, value in state.items():
        try:
            tree.encode(value, key)
            kept[key] = value
        except UnsupportedValueError as error:
            dropped[key] = str(error)
    return kept, dropped


def _optimizer_kind(config: Any) -> str:
    """Return the class that DeepSpeed 0.19.8 makes of its configuration's `optimizer`."""
    settings = config if isinstance(config, Mapping) else {}
    section = settings.get("optimizer") or {}
    name = str(section.get("type", ""))
    if name.lower() in ("adam", "adamw"):
        params = section.get("params") or {}
        decoupled = name.lower() == "adamw" or params.get("adam_w_mode", True)
        offload = settings.get("zero_optimization", {}).get("offload_optimizer") or {}
        if params.get("torch_adam"):
            return f"torch.optim.{'adamw.AdamW' if decoupled else 'adam.Adam'}"
        if offload.get("device", "none") != "none":
            return "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
        return "deepspeed.ops.adam.fused_adam.FusedAdam"
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type):
        raise ExchangeError(
            f"DeepSpeed's configuration names the optimizer {name or '(none)'}, whose class is not "
            "known here: give it, --optimizer package.module.Class"
        )
    return f"{kind.__module__}.{kind.__qualname__}"
