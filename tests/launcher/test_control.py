"""SAVE and STOP in the run directory."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from launcher.control import Asked, ControlFiles, refuse_leftover_stop
from launcher.errors import ConfigError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_save_is_asked_for_once_and_stop_until_it_is_done(tmp_path: Path) -> None:
    clock = Clock()
    control = ControlFiles(tmp_path, clock)
    assert control.look() == Asked()
    (tmp_path / "SAVE").touch()
    (tmp_path / "STOP").touch()
    assert control.look() == Asked(), "not twice a second"
    clock.now += 1
    assert control.look() == Asked(save=True, stop=True)
    clock.now += 1
    assert control.look() == Asked(stop=True)
    with pytest.raises(ConfigError, match="STOP is there"):
        refuse_leftover_stop(tmp_path)
    control.stop_is_done()
    refuse_leftover_stop(tmp_path)
    clock.now += 1
    assert control.look() == Asked()


def test_a_save_file_that_cannot_be_removed_does_not_save_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "SAVE").touch()
    with mock.patch.object(Path, "unlink", side_effect=PermissionError("read-only")):
        assert ControlFiles(tmp_path).look() == Asked()


def test_a_directory_that_is_gone_asks_for_nothing(tmp_path: Path) -> None:
    assert ControlFiles(tmp_path / "gone").look() == Asked()
