"""Fixtures of the protocol's tests."""

from pathlib import Path

import pytest

from tests.protocol.saves import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A checkpoint directory with nothing in it."""
    (tmp_path / "checkpoints" / ".attempts").mkdir(parents=True)
    return Run(tmp_path)
