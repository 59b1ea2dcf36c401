"""Durable state for DeepSpeed ZeRO-3 training: save while training, continue exactly.

    checkpointer = engine.attach(ds_engine, directory, engine.CheckpointOptions(keep_last=2))
    resumed = checkpointer.resume("auto")          # None on a first start
    checkpointer.save(step, sample_offset=...)     # returns when staged
    checkpointer.close()                           # returns when committed

Importing this package imports neither torch nor DeepSpeed: the writer process and the tools use
parts of it without them. The names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.bring_up import attach
    from engine.checkpoint.errors import (
        CheckpointError,
        FencedError,
        RefusedError,
        UnfaithfulSaveError,
    )
    from engine.checkpoint.options import CheckpointOptions
    from engine.checkpoint.under_way import UnderWay
    from engine.checkpointer import Checkpointer, ResumedState
    from engine.exchange.errors import ExchangeError
    from engine.protocol.acquire import Lease, RunHeldError, UnsuitableDirectoryError
    from engine.protocol.retention import KeepBest
    from engine.resume.errors import MismatchError, NothingToResumeError, ResumeError
    from engine.resume.initial import initialize_from

_WHERE = {
    "CheckpointError": "engine.checkpoint.errors",
    "CheckpointOptions": "engine.checkpoint.options",
    "Checkpointer": "engine.checkpointer",
    "ExchangeError": "engine.exchange.errors",
    "FencedError": "engine.checkpoint.errors",
    "KeepBest": "engine.protocol.retention",
    "Lease": "engine.protocol.acquire",
    "MismatchError": "engine.resume.errors",
    "NothingToResumeError": "engine.resume.errors",
    "RefusedError": "engine.checkpoint.errors",
    "ResumeError": "engine.resume.errors",
    "ResumedState": "engine.checkpointer",
    "RunHeldError": "engine.protocol.acquire",
    "UnderWay": "engine.checkpoint.under_way",
    "UnfaithfulSaveError": "engine.checkpoint.errors",
    "UnsuitableDirectoryError": "engine.protocol.acquire",
    "attach": "engine.bring_up",
    "initialize_from": "engine.resume.initial",
}

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "Checkpointer",
    "ExchangeError",
    "FencedError",
    "KeepBest",
    "Lease",
    "MismatchError",
    "NothingToResumeError",
    "RefusedError",
    "ResumeError",
    "ResumedState",
    "RunHeldError",
    "UnderWay",
    "UnfaithfulSaveError",
    "UnsuitableDirectoryError",
    "attach",
    "initialize_from",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
