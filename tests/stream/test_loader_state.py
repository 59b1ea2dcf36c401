"""A loader's own state, for loops that keep it; and where a stream ends."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from engine.stream import (
    Component,
    FingerprintMismatch,
    Place,
    Stream,
    StreamError,
    StreamLoader,
)
from tests.stream.datasets import Numbered

REPOSITORY = Path(__file__).parents[2]


def numbers(length: int = 50, epochs: int | None = None) -> Stream:
    return Stream([Component("only", Numbered(length), epochs=epochs)], seed=3)


def loader_of(stream: Stream, *, rank: int = 0, ranks: int = 1, **settings: int) -> StreamLoader:
    return StreamLoader(
        stream,
        dp_rank=rank,
        dp_world_size=ranks,
        **{"micro_batch_size": 2, "sample_offset": 0, "global_batch_size": 4 * ranks, **settings},
    )


def samples(loader: StreamLoader, batches: int) -> list[int]:
    return [int(sample) for batch in islice(loader, batches) for sample in batch]


def indices(stream: Stream, begin: int, end: int) -> list[int]:
    places: list[Place] = [stream.place(offset) for offset in range(begin, end)]
    return [place.index for place in places]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fresh_loader_with_the_state_gives_the_rest(workers: int) -> None:
    with closing(loader_of(numbers(), workers=workers)) as loader:
        used = samples(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["sample_offset"] == 6, "what was prefetched does not count"
    with closing(loader_of(numbers(), workers=workers)) as fresh:
        fresh.load_state_dict(state)
        rest = samples(fresh, 60)
    assert used + rest == indices(numbers(), 0, 126)


def test_the_state_of_one_rank_is_that_of_all_and_loads_at_any_number_of_them() -> None:
    loaders = [loader_of(numbers(), rank=rank, ranks=2) for rank in range(2)]
    for loader in loaders:
        samples(loader, 4)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    assert states[0]["sample_offset"] == 16
    single = loader_of(numbers(), micro_batch_size=4)
    single.load_state_dict(states[1])
    assert samples(single, 5) == indices(numbers(), 16, 36)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_loaded_in_the_middle_is_honoured_by_the_iterator_that_was_there(
    workers: int,
) -> None:
    """Nothing of what the workers had read ahead comes out, and they are gone."""
    with closing(loader_of(numbers(), workers=workers)) as loader:
        iterator = iter(loader)
        samples(loader, 2)
        state = loader.state_dict()
        samples(loader, 9)
        before = multiprocessing.active_children()
        loader.load_state_dict(state)
        assert not any(process.is_alive() for process in before)
        assert len(before) == workers
        assert next(iterator).tolist() == indices(numbers(), 4, 6)
        assert samples(loader, 2) == indices(numbers(), 6, 10)
        assert len(multiprocessing.active_children()) == workers


def test_the_newer_of_two_states_is_the_later_one() -> None:
    loader = loader_of(numbers(), micro_batch_size=1)
    samples(loader, 30)
    loader.state_dict()
    samples(loader, 10)
    fresh = loader_of(numbers(), micro_batch_size=1)
    fresh.load_state_dict(loader.state_dict())
    assert samples(fresh, 1) == indices(numbers(), 40, 41)


def test_a_state_before_the_first_batch_and_one_of_a_loader_that_started_elsewhere() -> None:
    assert loader_of(numbers()).state_dict()["sample_offset"] == 0
    loader = loader_of(numbers(), sample_offset=7)
    samples(loader, 1)
    assert loader.state_dict()["sample_offset"] == 9


def test_a_state_of_other_data_is_refused_and_can_be_accepted() -> None:
    loader = loader_of(numbers(50))
    samples(loader, 2)
    other = loader_of(numbers(51))
    with pytest.raises(FingerprintMismatch, match=r"components\.only\.samples"):
        other.load_state_dict(loader.state_dict())
    assert samples(other, 1) == indices(numbers(51), 0, 2), "it is as it was"
    other.load_state_dict(loader.state_dict(), accept_changed=True)
    assert samples(other, 1) == indices(numbers(51), 4, 6)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "not that of a StreamLoader: .* found nothing"),
        ({"_num_yielded": 3}, "not that of a StreamLoader: .* found '_num_yielded'"),
        ({"sample_offset": -1, "fingerprint": {}}, "sample offset is -1"),
        ({"sample_offset": 1.0, "fingerprint": {}}, r"sample offset is 1\.0"),
    ],
)
def test_what_is_no_state_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        loader_of(numbers()).load_state_dict(state)


def test_a_closed_loader_loads_nothing() -> None:
    loader = loader_of(numbers())
    state = loader.state_dict()
    loader.close()
    with pytest.raises(StreamError, match="the loader is closed"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_ends_gives_whole_global_batches_on_all_ranks_alike(workers: int) -> None:
    stream = numbers(7, epochs=3)  # 21 samples: two global batches of eight
    found = []
    for rank in range(2):
        with closing(loader_of(stream, rank=rank, ranks=2, workers=workers)) as loader:
            state = loader.state_dict()
            batches = list(loader)
            assert list(loader) == [], "an end is an end"
            assert loader.state_dict()["sample_offset"] == 16
            found.append([batch.tolist() for batch in batches])
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == found[-1]
    in_order = [sample for pair in zip(*found, strict=True) for batch in pair for sample in batch]
    assert in_order == indices(stream, 0, 16)


def test_a_loader_that_starts_behind_the_end_is_empty() -> None:
    assert list(loader_of(numbers(7, epochs=1), sample_offset=100)) == []


def test_a_loop_without_deepspeed_can_use_it_alone() -> None:
    code = (
        "import sys; from engine.stream import Component, Stream, StreamLoader; "
        "loader = StreamLoader(Stream([Component('x', range(9))], seed=0), micro_batch_size=2, "
        "dp_rank=0, dp_world_size=1, sample_offset=0, global_batch_size=2); "
        "next(loader); loader.load_state_dict(loader.state_dict()); "
        "sys.exit('deepspeed' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)
