"""Fixtures of the tests of resuming."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks

Results = list[dict[str, Any]]
"""By rank of the tree, and then by case."""


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the cases returned: all of them ran in one process tree, which starts slowly."""
    root: Path = tmp_path_factory.mktemp("resume")
    return run_ranks("tests.resume.cases:all_of_them", 4, root=str(root))
