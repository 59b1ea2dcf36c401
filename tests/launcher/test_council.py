"""Ranks say the same thing: one rank's error is everybody's, in the same words."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from launcher import versions
from launcher.config import BatchSettings, RunSettings, Settings
from launcher.council import Council, RendezvousError, meet
from launcher.errors import ConfigError, NoProgressError
from launcher.meeting import place_of
from launcher.topology import Topology
from tests.launcher.test_config import compose

RANKS = 3
VERSIONS = {"python": "3.11.2", "torch": "2.13.0"}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("sys.argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return compose("experiment=tiny")


def on_each_rank(action: Callable[[Council, int], Any]) -> list[Any]:
    """Run the action as three ranks of one store; return what each returned or raised."""
    store = distributed.HashStore()
    outcomes: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            outcomes[rank] = action(Council(store, rank, RANKS), rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_rank_0_alone_is_asked_and_all_hear_the_answer() -> None:
    asked: list[int] = []

    def ask(council: Council, rank: int) -> str:
        def answer() -> str:
            asked.append(rank)
            return f"rank {rank} says so"

        return council.ask_rank_0("question", answer)

    assert on_each_rank(ask) == ["rank 0 says so"] * RANKS
    assert asked == [0]


def test_ranks_with_the_same_settings_go_on(settings: Settings) -> None:
    outcomes = on_each_rank(lambda council, rank: council.settle_settings(settings, VERSIONS))
    assert outcomes == [settings] * RANKS


def test_a_setting_that_one_rank_has_otherwise_is_named_on_all(settings: Settings) -> None:
    other = replace(settings, batch=BatchSettings(8, 4), run=RunSettings("tiny", settings.run.dir))
    outcomes = on_each_rank(
        lambda council, rank: council.settle_settings(other if rank == 2 else settings, VERSIONS)
    )
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
    lines = str(outcomes[0]).splitlines()
    assert "batch.micro_size" in lines[0]
    assert lines[1:3] == ["  rank 0: 2", "  rank 2: 4"]


def test_an_error_of_one_rank_alone_reaches_all(settings: Settings) -> None:
    wrong = ConfigError("unknown setting 'x'")
    outcomes = on_each_rank(
        lambda council, rank: council.settle_settings(wrong if rank == 1 else settings, VERSIONS)
    )
    assert [str(outcome) for outcome in outcomes] == ["unknown setting 'x'"] * RANKS


def test_versions_that_differ_are_named_on_all(settings: Settings) -> None:
    other = VERSIONS | {"torch": "2.12.1"}
    outcomes = on_each_rank(
        lambda council, rank: council.settle_settings(settings, other if rank == 1 else VERSIONS)
    )
    assert {str(outcome) for outcome in outcomes} == {str(outcomes[0])}
    assert str(outcomes[0]).splitlines()[:3] == [
        "the ranks run different versions of torch:",
        "  rank 0: 2.13.0",
        "  rank 1: 2.12.1",
    ]
    assert set(versions.installed()) >= {"python", "torch", "deepspeed", "everstep"}


def test_ranks_that_do_not_come_are_named(settings: Settings) -> None:
    store = distributed.HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    with pytest.raises(RendezvousError, match=r"2 of 3 ranks did not come \(settings\): rank 1, 2"):
        Council(store, 0, RANKS).settle_settings(settings, VERSIONS)


def test_the_ranks_of_a_start_agree_on_a_port_that_is_free(tmp_path: Path) -> None:
    """Whatever the environment's port is: here another program has it."""
    place = tmp_path / "run" / "meeting"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ThreadPoolExecutor() as pool:
            topologies = [Topology(rank, 2, rank, 2, "srun", "127.0.0.1", port) for rank in (1, 0)]
            councils = list(pool.map(lambda t: meet(t, {}, place), topologies))
            settled = list(pool.map(lambda council: council.settle("phase", None), councils))
    assert settled == [None, None]


def test_a_rank_that_hears_nothing_of_rank_0_says_where_it_looked(tmp_path: Path) -> None:
    place = tmp_path / "meeting"
    with pytest.raises(RendezvousError, match=str(place)):
        meet(Topology(1, 2, 1, 2, "srun", "127.0.0.1", 1), {}, place, timedelta(seconds=0.1))


def test_a_start_has_a_name_where_its_starter_gives_one(tmp_path: Path) -> None:
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}
    assert place_of(srun, tmp_path) == tmp_path / ".meeting.7.1.0"
    assert place_of(srun | {"SLURM_RESTART_COUNT": "2"}, tmp_path) == tmp_path / ".meeting.7.1.2"
    assert place_of(srun | {"EVERSTEP_LINK": "/x"}, tmp_path) == Path("/x/meeting")
    assert place_of(srun | {"MASTER_PORT": "1234"}, tmp_path) is None
    assert place_of({"RANK": "0", "LOCAL_RANK": "0"}, tmp_path) is None


def test_a_phase_settles_with_the_lowest_ranks_error_and_the_given_kind() -> None:
    def action(council: Council, rank: int) -> None:
        council.settle("first", None)
        council.settle("second", f"rank {rank} cannot" if rank else None, NoProgressError)

    outcomes = on_each_rank(action)
    assert all(isinstance(outcome, NoProgressError) for outcome in outcomes)
    assert {str(outcome) for outcome in outcomes} == {"rank 1 cannot"}


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Topology(0, 2, 0, 2, "deepspeed", "127.0.0.1", port)
        with pytest.raises(RendezvousError, match=f"port {port}.*\n*.*--master_port"):
            meet(place, {})
