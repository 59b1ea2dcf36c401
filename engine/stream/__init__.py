"""Data in exact order: permutation, mixture, token files, loader, fingerprint.

The samples of a run are one sequence, and a sample's place in it is a pure function of its
offset. To resume, build the same `Stream` and a `StreamLoader` at the sample offset.

Importing this package imports neither torch nor a data set; the names below do when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.stream.corpus import DocumentationText, LibrarySources
    from engine.stream.errors import FingerprintMismatch, StreamError, WorkerDied
    from engine.stream.files.arrow import HuggingFaceTokens
    from engine.stream.files.datatrove import DatatroveTokens
    from engine.stream.files.megatron import MegatronTokens
    from engine.stream.files.parquet import ParquetTokens
    from engine.stream.files.raw import LlmcTokens, TokenFile
    from engine.stream.loader import StreamLoader
    from engine.stream.order import Order, Place
    from engine.stream.schedule import Stage
    from engine.stream.stream import Component, Stream
    from engine.stream.tokens import TokenWindows, Windows

__all__ = [
    "Component",
    "DatatroveTokens",
    "DocumentationText",
    "FingerprintMismatch",
    "HuggingFaceTokens",
    "LibrarySources",
    "LlmcTokens",
    "MegatronTokens",
    "Order",
    "ParquetTokens",
    "Place",
    "Stage",
    "Stream",
    "StreamError",
    "StreamLoader",
    "TokenFile",
    "TokenWindows",
    "Windows",
    "WorkerDied",
]

_HOMES = {
    "Component": "stream",
    "DatatroveTokens": "files.datatrove",
    "DocumentationText": "corpus",
    "FingerprintMismatch": "errors",
    "HuggingFaceTokens": "files.arrow",
    "LibrarySources": "corpus",
    "LlmcTokens": "files.raw",
    "MegatronTokens": "files.megatron",
    "Order": "order",
    "ParquetTokens": "files.parquet",
    "Place": "order",
    "Stage": "schedule",
    "Stream": "stream",
    "StreamError": "errors",
    "StreamLoader": "loader",
    "TokenFile": "files.raw",
    "TokenWindows": "tokens",
    "Windows": "tokens",
    "WorkerDied": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
