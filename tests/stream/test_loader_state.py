"""A loader's own state, for loops that keep it; and where a stream ends."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.stream import StreamError
from tests.stream.reading import indices, loader_of, numbers, samples

REPOSITORY = Path(__file__).parents[2]


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


def test_a_state_before_the_first_batch_and_one_of_a_loader_that_started_elsewhere() -> None:
    assert loader_of(numbers()).state_dict()["sample_offset"] == 0
    loader = loader_of(numbers(), sample_offset=7)
    samples(loader, 1)
    assert loader.state_dict()["sample_offset"] == 9


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
