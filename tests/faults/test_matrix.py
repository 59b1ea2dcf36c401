"""The fault matrix: every victim, killed with SIGKILL while a save is at every moment of its life.

Real DeepSpeed ranks are in `test_deepspeed_ranks.py`; DeepSpeed's own starters in
`tests/launcher/test_starter_lost.py`.
"""

from pathlib import Path

import pytest

from tests import daemons
from tests.faults import points
from tests.faults.matrix import Row, Victims

MARK = "EVERSTEP_TEST_FAULTS"


@pytest.mark.parametrize("moment", points.MOMENTS)
def test_what_is_killed_at_this_moment_loses_and_mixes_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    row = Row(tmp_path, moment)
    try:
        for victims in Victims:
            row.hit(victims)
        row.finish()
    finally:
        row.close()
    # Images have no name: with the last process that holds them they are gone.
    assert daemons.marked(MARK, tmp_path) == []
    assert len(list(tmp_path.glob("fired.*"))) == len(Victims)
