"""Micro batches: the cut over ranks, and continuing at any offset with any layout.

Where not said otherwise: the samples before and after a restore, joined, are those of the run that
never stopped, in order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stream import (
    Component,
    Stage,
    Stream,
    StreamError,
    StreamLoader,
    TokenFile,
    TokenWindows,
)
from engine.stream.source import SAMPLED_RANGES, SAMPLED_TOKENS
from tests.stream.datasets import Augmented, Numbered, Told

Sample = tuple[int, ...]


def mixed() -> Stream:
    """Two components whose epochs end after 11 and 4 draws of theirs; every sample has draws."""
    return Stream([Component("a", Augmented(11), 0.6), Component("b", Augmented(4), 0.4)], seed=5)


def planned() -> Stream:
    """The same with all that a plan can hold: a limit that is reached, stages, skips, an end."""
    return Stream(
        [
            Component("a", Augmented(11), 0.6, epochs=3),
            Component("b", Augmented(4), 0.4, epochs=2),
            Component("c", Augmented(7), 0.0, epochs=3),
        ],
        seed=5,
        stages=[Stage(13, {"a": 0.1}), Stage(29, {"a": 0.5, "c": 0.5})],
        skip=[[5, 7], [12, 16], [40, 41]],
    )


def expected(stream: Stream, begin: int, end: int) -> list[Sample]:
    """Read the samples one by one, without a loader."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    samples = [stream.sample(index) for index in range(begin, end)]
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return [tuple(int(value) for value in sample.values()) for sample in samples]


@contextmanager
def all_ranks(
    stream: Stream,
    *,
    ranks: int,
    micro: int,
    offset: int,
    workers: int = 0,
    accumulation: int = 1,
    state: dict[str, Any] | None = None,
) -> Iterator[Iterator[list[Sample]]]:
    """Yield an iterator over micro steps, each the samples of all ranks in rank order.

    Starts at `offset`, or with loaders made at 0 that load a state which says it.
    """
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                closing(
                    StreamLoader(
                        stream,
                        micro_batch_size=micro,
                        dp_rank=rank,
                        dp_world_size=ranks,
                        sample_offset=offset if state is None else 0,
                        global_batch_size=ranks * micro * accumulation,
                        workers=workers,
                    )
                )
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        yield (
            [
                sample
                for loader in loaders
                for sample in zip(*(part.tolist() for part in next(loader).values()), strict=True)
            ]
            for _ in itertools.count()
        )


def read(count: int, stream: Stream | None = None, **layout: Any) -> list[Sample]:
    """Read `count` samples of a stream, a fresh one if none is given, with fresh loaders."""
    per_micro_step = layout["ranks"] * layout["micro"]
    assert count % per_micro_step == 0
    with all_ranks(stream or mixed(), **layout) as micro_steps:
        return [
            sample
            for micro_step in itertools.islice(micro_steps, count // per_micro_step)
            for sample in micro_step
        ]


@pytest.mark.parametrize("make", [mixed, planned])
def test_restored_at_every_position_over_two_epoch_ends_the_whole_tail_is_the_same(
    make: Callable[[], Stream],
) -> None:
    """With other ranks, micro and global batches and workers each time, all of it made anew."""
    layouts = itertools.cycle(
        [(1, 1, 6), (2, 1, 1), (1, 3, 2), (2, 3, 1), (3, 2, 1), (6, 1, 1), (1, 6, 1), (3, 1, 2)]
    )
    # Without a plan, "a" ends its second epoch at about 37 and "b" its fourth at 40. With it, every
    # sample but the seven that are skipped is used, and the global batches of 6 end one before it.
    assert planned().length == 33 + 8 + 21 - 7 == 55
    count = 54 if make is planned else 48
    uninterrupted = read(count, make(), ranks=2, micro=1, offset=0)
    assert uninterrupted == expected(make(), 0, count)
    workers = itertools.cycle([0, 0, 1, 0, 2])
    for position in range(count):
        ranks, micro, accumulation = next(layouts)
        tail = -(-(count - position) // 6) * 6
        stream = make()
        if stream.length is not None:
            tail = (stream.length - position) // 6 * 6
        resumed = read(
            tail,
            stream,
            ranks=ranks,
            micro=micro,
            accumulation=accumulation,
            offset=position,
            workers=next(workers),
            state={"sample_offset": position, "fingerprint": make().fingerprint()}
            if position % 2
            else None,
        )
        joined = uninterrupted[:position] + resumed
        assert joined[:count] == uninterrupted[: len(joined)], (position, ranks, micro)


@given(offset=st.integers(0, 10**12), ranks=st.integers(1, 5), micro=st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_any_offset_is_continued_exactly_whatever_divides_it(
    offset: int, ranks: int, micro: int
) -> None:
    count = 2 * ranks * micro
    found = read(count, ranks=ranks, micro=micro, offset=offset)
    assert found == expected(mixed(), offset, offset + count)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_and_what_they_prefetched_do_not_count_as_used(workers: int) -> None:
    """Each rank's workers have read ahead of the third micro step when the run stops there."""
    with all_ranks(mixed(), ranks=2, micro=2, offset=0, workers=workers) as micro_steps:
        used = [sample for step in itertools.islice(micro_steps, 3) for sample in step]
    resumed = read(24, ranks=1, micro=3, offset=len(used), workers=workers)
    assert used + resumed == expected(mixed(), 0, 36)


def test_four_ranks_then_two_then_eight_read_the_same_global_batches() -> None:
    found = [
        read(8, ranks=ranks, micro=8 // ranks, offset=8 * step)
        for step, ranks in enumerate((4, 2, 8))
    ]
    assert list(itertools.chain(*found)) == expected(mixed(), 0, 24)


def test_each_rank_takes_its_own_slice_of_each_micro_step() -> None:
    stream = Stream([Component("only", Numbered(1000))], seed=0)
    offset, ranks, micro = 7, 3, 2
    for rank in range(ranks):
        loader = StreamLoader(
            stream,
            micro_batch_size=micro,
            dp_rank=rank,
            dp_world_size=ranks,
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
    loader = StreamLoader(
        stream,
        micro_batch_size=4,
        dp_rank=0,
        dp_world_size=1,
        sample_offset=10**12,
        global_batch_size=4,
    )
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


def test_a_draw_inside_a_data_set_is_new_in_each_epoch_and_for_each_sample() -> None:
    stream = Stream([Component("only", Augmented(10))], seed=0)
    samples = expected(stream, 0, 30)
    assert sorted(sample[0] for sample in samples) == sorted(3 * list(range(10)))
    for generator in (1, 2, 3):
        assert len({sample[generator] for sample in samples}) == 30
    other = Stream([Component("only", Augmented(10))], seed=1)
    assert not {s[1] for s in samples} & {s[1] for s in expected(other, 0, 30)}


def single(stream: Stream, micro: int = 1, workers: int = 0) -> StreamLoader:
    return StreamLoader(
        stream,
        micro_batch_size=micro,
        dp_rank=0,
        dp_world_size=1,
        sample_offset=0,
        global_batch_size=micro,
        workers=workers,
    )


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
