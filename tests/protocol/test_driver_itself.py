"""The driver's own eyes: each promise that is broken by hand is seen."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from engine.format import names
from tests.protocol.driver.content import MixedError, read_whole
from tests.protocol.driver.inspect import LeftError, Reader, check_latest, check_leftovers
from tests.protocol.driver.promises import Floor, LostError, Promised
from tests.protocol.saves import WORLD_SIZE, Run

ONE, TWO = "a0000.s0001.global_step10.5ca1ab1e", "a0000.s0002.global_step20.5ca1ab1e"


def _event(kind: str, rank: int, save_id: str = ONE, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "rank": rank, "save_id": save_id, **fields}


@pytest.mark.parametrize(
    ("events", "promised"),
    [
        ([_event("sealed", 0, writer=7)], set()),
        ([_event("sealed", 0, writer=7), _event("sealed", 1, writer=8)], {ONE}),
        ([_event("sealed", 0, writer=66), _event("sealed", 1, writer=8)], set()),
        ([_event("persisted", 0), _event("sealed", 1, writer=8)], set()),
        ([_event("sealed", 0, writer=7), _event("persisted", 1)], {ONE}),
        ([_event("committed", 0)], {ONE}),
        (
            [
                _event("sealed", 0, writer=66),
                _event("sealed", 1, writer=8),
                {"event": "writer", "rank": 0, "pid": 9, "saves": [ONE]},
            ],
            {ONE},
        ),
        (
            [
                _event("sealed", 0, writer=7),
                _event("sealed", 1, writer=8),
                _event("abandoned", 0),
            ],
            set(),
        ),
    ],
)
def test_what_is_promised(events: list[dict[str, Any]], promised: set[str]) -> None:
    assert Promised.by(events, world_size=2, killed={66}).saves == promised


def test_a_save_given_up_with_all_writers_alive_is_lost() -> None:
    events = [_event("sealed", 0, writer=7), _event("abandoned", 0)]
    with pytest.raises(LostError, match="given up"):
        Promised.by(events, world_size=1, killed=())


def test_an_older_start_and_another_save_of_the_step_are_lost() -> None:
    events = [_event("committed", 0, save_id) for save_id in (TWO, ONE)]
    floor = Floor().raised_by(Promised.by(events, 1, ()).saves)
    assert floor == Floor(20, TWO)
    floor.check({"attempt": 1, "step": 20, "parent": TWO})
    floor.check({"attempt": 1, "step": 21, "parent": "another"})
    for step, parent in ((10, ONE), (20, "another")):
        with pytest.raises(LostError):
            floor.check({"attempt": 1, "step": step, "parent": parent})


@pytest.mark.parametrize("at", [0, 5000, -1])
def test_one_byte_of_another_save_is_mixed(run: Run, at: int) -> None:
    run.attempt(0)
    run.commit(0, 10)
    tag = run.directory.tag("global_step10")
    shard = Path(tag, names.shard_name(1, WORLD_SIZE))
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    read_whole(tag)
    shard.write_bytes(data)
    with pytest.raises(MixedError):
        read_whole(tag)


def test_a_visible_tag_without_its_manifest_is_seen(run: Run) -> None:
    run.attempt(0)
    run.commit(0, 10)
    os.unlink(os.path.join(run.directory.tag("global_step10"), "manifest.json"))
    with pytest.raises(FileNotFoundError):
        Reader(run.directory).in_place()


@pytest.mark.parametrize(
    "path",
    [
        ".part.1.x",
        "global_step11.s0001",
        "global_step10/failed.00001",
        ".attempts/.new.0001.x",
        ".attempts/0000/closed/global_step12.s0003",
        ".attempts/0000/closed/trash/swept",
        ".attempts/0000/.poke.1.x",
        ".attempts/0000/open",
    ],
)
def test_what_should_have_been_swept_is_seen(run: Run, path: str) -> None:
    run.attempt(0)
    run.commit(0, 10)
    run.close(0)
    run.attempt(1)
    check_leftovers(run.directory, 1, transient=False)
    os.mkdir(os.path.join(run.directory.root, path))
    with pytest.raises(LeftError, match=re.escape(path)):
        check_leftovers(run.directory, 1, transient=False)


def test_a_pointer_to_another_tag_is_seen(run: Run) -> None:
    run.attempt(0)
    run.commit(0, 10)
    Path(run.directory.latest).write_text("global_step9\n")
    with pytest.raises(LeftError, match="global_step9"):
        check_latest(run.directory, Reader(run.directory).in_place())
