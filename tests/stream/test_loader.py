"""Micro batches: the cut over ranks, what they are made of, and what a loader refuses."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.utils.data

from engine.stream import (
    Component,
    Stream,
    StreamError,
    StreamLoader,
    TokenFile,
    TokenWindows,
)
from engine.stream.source import SAMPLED_RANGES, SAMPLED_TOKENS
from tests.stream.datasets import Numbered, Told
from tests.stream.reading import expected, loader_of, mixed, read


def test_each_rank_takes_its_own_slice_of_each_micro_step() -> None:
    stream = Stream([Component("only", Numbered(1000))], seed=0)
    offset, ranks, micro = 7, 3, 2
    for rank in range(ranks):
        loader = loader_of(
            stream,
            rank=rank,
            ranks=ranks,
            micro_batch_size=micro,
            sample_offset=offset,
            global_batch_size=12,
        )
        for micro_step in range(4):
            begin = offset + (micro_step * ranks + rank) * micro
            wanted = [stream.place(index).index for index in range(begin, begin + micro)]
            assert next(loader).tolist() == wanted


def test_starting_far_away_reads_only_the_first_batch() -> None:
    reads: list[int] = []
    stream = Stream([Component("only", Told(100, reads.append))], seed=0)
    loader = loader_of(stream, micro_batch_size=4, sample_offset=10**12)
    assert next(loader).tolist() == reads
    assert len(reads) == 4


def test_asking_for_an_iterator_again_goes_on_and_never_starts_over() -> None:
    with closing(single(mixed(), micro=2)) as loader:
        first = next(iter(loader))
        second = next(iter(loader))
    found = [*zip(*(first[k].tolist() for k in first), strict=True)]
    found += zip(*(second[k].tolist() for k in second), strict=True)
    assert found == expected(mixed(), 0, 4)


class Doubled(TokenWindows):
    """Windows that make samples of their own."""

    def window(self, index: int) -> npt.NDArray[np.int64]:
        return 2 * super().window(index)


class Marked(TokenWindows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [TokenWindows, Doubled, Marked])
def test_a_micro_batch_of_windows_is_what_torch_collates_of_its_samples(
    kind: type[TokenWindows], workers: int
) -> None:
    def components(kind: type[TokenWindows]) -> list[Component]:
        tokens = np.arange(300)
        return [
            Component("a", kind(tokens.astype("<u2"), seq_len=6, source="a"), 0.6),
            Component("b", kind(tokens.astype("<i4"), seq_len=6, source="b"), 0.4),
        ]

    stream = Stream(components(kind), seed=2)
    with closing(single(stream, micro=4, workers=workers)) as loader:
        for begin in range(0, 40, 4):
            batch = next(loader)
            offsets = range(begin, begin + 4)
            wanted = torch.utils.data.default_collate([stream.sample(o) for o in offsets])
            assert list(batch) == list(wanted)
            for name, value in batch.items():
                assert value.dtype == torch.int64
                assert value.is_contiguous()
                assert torch.equal(value, wanted[name])


def test_a_token_outside_the_vocabulary_is_named_by_sample_and_by_file(tmp_path: Path) -> None:
    tokens = np.zeros(3 * SAMPLED_RANGES * SAMPLED_TOKENS, dtype="<u2")
    tokens[2 * SAMPLED_TOKENS] = 300  # between two of the ranges that are looked at at the start
    tokens.tofile(tmp_path / "t.bin")
    seq_len = SAMPLED_TOKENS
    windows = TokenFile(tmp_path / "t.bin", seq_len=seq_len, component="web", vocab_size=257)
    stream = Stream([Component("web", windows)], seed=0)
    offset = next(o for o in range(len(windows)) if stream.place(o).index == 2)
    loader = single(stream, micro=2)
    loader.load_state_dict({"sample_offset": offset - 1, "fingerprint": stream.fingerprint()})
    with pytest.raises(StreamError) as raised:
        next(loader)
    assert f"component 'web', epoch 0, index 2 (global index {offset})" in str(raised.value)
    assert f"token 300 at byte {4 * SAMPLED_TOKENS} of {tmp_path / 't.bin'}" in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainers_generators_are_neither_used_nor_moved(workers: int) -> None:
    found = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        found.append(read(8, ranks=1, micro=4, offset=0, workers=workers))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        assert after[:2] == before[:2]
        assert torch.equal(after[2], before[2])
    assert found[0] == found[1]


def single(stream: Stream, micro: int = 1, workers: int = 0) -> StreamLoader:
    return loader_of(stream, micro_batch_size=micro, global_batch_size=micro, workers=workers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 10}, r"batch\.global_size is 10, .* multiple of .* 2 x 4 = 8"),
        ({"micro_batch_size": 0}, r"batch\.micro_size is 0"),
        ({"dp_rank": 4}, "dp_rank is 4, wanted less than dp_world_size 4"),
        ({"dp_rank": -1}, "dp_rank is -1"),
        ({"dp_world_size": 0}, "dp_world_size is 0"),
        ({"sample_offset": -1}, "sample offset is -1"),
        ({"sample_offset": 8.0}, r"sample offset is 8\.0, wanted a whole number"),
        ({"workers": -1}, r"data\.workers is -1"),
        ({"prefetch_batches": 0}, r"data\.prefetch_batches is 0"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(change: dict[str, int], message: str) -> None:
    settings_ = {
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_world_size": 4,
        "sample_offset": 0,
        "global_batch_size": 16,
        **change,
    }
    with pytest.raises(StreamError, match=message):
        StreamLoader(mixed(), **settings_)
