"""Ranks say the same thing: one rank's error is everybody's, in the same words."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import distributed

from launcher.config import BatchSettings, RunSettings, Settings
from launcher.council import Council, RendezvousError, meet
from launcher.errors import ConfigError, NoProgressError
from launcher.topology import Topology
from tests.launcher.test_config import compose

RANKS = 3


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


def test_ranks_with_the_same_settings_go_on(settings: Settings) -> None:
    outcomes = on_each_rank(lambda council, rank: council.settle_settings(settings))
    assert outcomes == [settings] * RANKS


def test_a_setting_that_one_rank_has_otherwise_is_named_on_all(settings: Settings) -> None:
    other = replace(settings, batch=BatchSettings(8, 4), run=RunSettings("tiny", settings.run.dir))
    outcomes = on_each_rank(
        lambda council, rank: council.settle_settings(other if rank == 2 else settings)
    )
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
    lines = str(outcomes[0]).splitlines()
    assert "batch.micro_size" in lines[0]
    assert lines[1:3] == ["  rank 0: 2", "  rank 2: 4"]


def test_an_error_of_one_rank_alone_reaches_all(settings: Settings) -> None:
    wrong = ConfigError("unknown setting 'x'")
    outcomes = on_each_rank(
        lambda council, rank: council.settle_settings(wrong if rank == 1 else settings)
    )
    assert [str(outcome) for outcome in outcomes] == ["unknown setting 'x'"] * RANKS


def test_a_phase_settles_with_the_lowest_ranks_error_and_the_given_kind() -> None:
    def action(council: Council, rank: int) -> None:
        council.settle("first", None)
        council.settle("second", f"rank {rank} cannot" if rank else None, NoProgressError)

    outcomes = on_each_rank(action)
    assert all(isinstance(outcome, NoProgressError) for outcome in outcomes)
    assert {str(outcome) for outcome in outcomes} == {"rank 1 cannot"}


def test_a_port_that_another_program_has_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Topology(0, 2, 0, 2, "deepspeed", "127.0.0.1", port)
        with pytest.raises(RendezvousError, match=f"port {port}.*\n*.*--master_port"):
            meet(place, {})
