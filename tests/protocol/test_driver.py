"""The protocol under kills: chains of attempts, with fixed seeds. See `tests.protocol.driver`."""

from pathlib import Path

import pytest

from engine.protocol.layout import MANIFEST, CheckpointDirectory
from tests.protocol.driver import inspect
from tests.protocol.driver.chain import Chain
from tests.protocol.driver.faults import Fault

_KILLS = {fault.name for fault in Fault} - {Fault.ZOMBIE.name}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("attempts", "seed"), [(130, 20260131)])
def test_killed_attempts_lose_and_mix_nothing(tmp_path: Path, attempts: int, seed: int) -> None:
    figures = Chain(str(tmp_path), seed, zombies=False).run(attempts)
    print(vars(figures))
    assert set(figures.fired) == _KILLS, "every planned fault must have fired"
    assert min(figures.fired.values()) > 0
    assert figures.attempts == attempts
    assert figures.saves_promised > attempts
    assert figures.tags_verified > attempts / 2
    assert figures.rollbacks > 0
    assert figures.strays > 0
    assert figures.writers_restarted > 0
    assert figures.writers_left == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("attempts", "seed"), [(50, 20260131)])
def test_what_is_only_on_the_nodes_own_disks_is_lost_with_them_alone(
    tmp_path: Path, attempts: int, seed: int
) -> None:
    figures = Chain(str(tmp_path), seed, zombies=False, local=True).run(attempts)
    print(vars(figures))
    assert figures.attempts == attempts
    assert figures.saves_only_local > 0
    assert figures.resumed_locally > 0
    assert sum(figures.disks.values()) > 0
    assert figures.writers_left == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("attempts", "seed"), [(40, 20260131)])
def test_attempts_that_only_seemed_dead_change_nothing(
    tmp_path: Path, attempts: int, seed: int
) -> None:
    figures = Chain(str(tmp_path), seed, zombies=True).run(attempts)
    print(vars(figures))
    assert figures.fired[Fault.ZOMBIE.name] > 0
    assert figures.zombies_fenced > 0, "a woken trainer must have been told"
    assert figures.refused > 0, "a start beside a woken trainer must have been refused"
    assert figures.attempts == attempts
    assert figures.writers_left == 0


def test_a_tag_is_read_again_where_another_has_come_to_its_path_and_its_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems give a removed directory's inode to the next one: a chain has met that."""
    monkeypatch.setattr(inspect, "read_whole", lambda path: Path(path, MANIFEST).read_text())
    manifest = tmp_path / "global_step1" / MANIFEST
    manifest.parent.mkdir()
    reader = inspect.Reader(CheckpointDirectory(str(tmp_path)))
    for save in ("one", "one", "another"):
        manifest.write_text(save)
        assert reader.in_place() == [save]
    assert reader.verified == 2, "the same is read once"
