"""The package's public face, and that it is light to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import engine.stream

REPOSITORY = Path(__file__).parents[2]


def test_every_public_name_is_there() -> None:
    for name in engine.stream.__all__:
        assert getattr(engine.stream, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        engine.stream.Loader  # noqa: B018


def test_building_a_stream_does_not_import_torch() -> None:
    code = (
        "import sys; from engine.stream import Component, Stream, StreamError; "
        "Stream([Component('x', range(3))], seed=0).place(1); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)
