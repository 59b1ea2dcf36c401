"""What a rank's shard is to hold at this moment, by reference, as DeepSpeed hands it over."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.checkpoint import rng
from engine.checkpoint.deepspeed_engine import StateDict
from engine.checkpoint.plan import Structure
from engine.checkpoint.session import Session
from engine.checkpoint.zero3 import Layout, LiveState, buffers


def collect(session: Session, tag: str) -> dict[str, StateDict]:
    """Have DeepSpeed hand over both of its state dicts, "model" and "optimizer". Collective."""
    with session.checkpoint_engine.collecting() as collected:
        session.ds_engine.save_checkpoint(
            session.directory.root,
            tag=tag,
            client_state={},
            save_latest=False,
            exclude_frozen_parameters=not session.layout.holds_frozen,
        )
    return collected


@dataclass(frozen=True)
class Snapshot:
    """One rank's live state. Nothing is copied but the states of the random number generators.

    live       tensors of which the rank has slices
    whole      buffers and RNG states, by entry name
    structure  of both
    """

    live: LiveState
    whole: Mapping[str, torch.Tensor]
    structure: Structure

    @classmethod
    def of(cls, layout: Layout, collected: Mapping[str, StateDict]) -> "Snapshot":
        """Name what `collect` has returned. Raises RefusedError, ValueError: it cannot be saved."""
        model, zero = collected["model"], collected["optimizer"]["optimizer_state_dict"]
        live = LiveState.of(layout, model, zero)
        whole = {**buffers(model), **rng.capture()}
        return cls(live, whole, Structure.of(live, whole))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All live tensors, flat and detached, in the order in which plans number them."""
        flats = (flat.tensor for flat in self.live.flats)
        every = (*flats, *self.live.frozen, *self.whole.values())
        return [tensor.detach().reshape(-1) for tensor in every]
