"""What went wrong elsewhere, by public report: twenty cases, each numbered.

Where not said otherwise: the samples before and after a restore, joined, are those of the run that
never stopped, in order. Every restore is into fresh objects.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.stream import Component, FingerprintMismatch, Stage, Stream, StreamLoader
from launcher.config import settings_from
from tests.stream.datasets import Augmented, Numbered
from tests.stream.reading import (
    all_ranks,
    expected,
    indices,
    loader_of,
    mixed,
    numbers,
    read,
    samples,
)

# torch says so where a test has more workers than there are cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def saved(loader: StreamLoader) -> dict[str, Any]:
    """Return a loader's state as a checkpoint gives it back."""
    return json.loads(json.dumps(loader.state_dict()))


def restored(state: dict[str, Any], stream: Stream, **layout: int) -> StreamLoader:
    loader = loader_of(stream, **layout)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_01_a_fresh_loader_goes_on_behind_the_last_batch_and_numpy_is_left_alone(
    workers: int,
) -> None:
    """DeepSpeed#8405."""
    np.random.seed(7)
    before = np.random.get_state()[1].tolist()
    with closing(loader_of(numbers(), workers=workers)) as loader:
        used = samples(loader, 3)
        state = saved(loader)
    assert state["sample_offset"] == 6, "what was prefetched does not count"
    with closing(restored(state, numbers(), workers=workers)) as fresh:
        rest = samples(fresh, 60)
    assert used + rest == indices(numbers(), 0, 126)
    assert np.random.get_state()[1].tolist() == before


def test_02_a_save_at_the_end_of_the_second_epoch_goes_on_with_the_third() -> None:
    """pytorch/data#1437: 100 samples; epochs were dropped, or came again."""
    loader = loader_of(numbers(100))
    used = samples(loader, 100)
    rest = samples(restored(saved(loader), numbers(100)), 100)
    assert used + rest == indices(numbers(100), 0, 400)
    epochs = [(used + rest)[begin : begin + 100] for begin in range(0, 400, 100)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_03_a_save_at_the_last_step_of_the_first_of_two_epochs_leaves_the_whole_second() -> None:
    """verl#7401: the run was taken for complete."""
    loader = loader_of(numbers(100, epochs=2))
    samples(loader, 50)
    rest = [int(sample) for batch in restored(saved(loader), numbers(100, 2)) for sample in batch]
    assert rest == indices(numbers(100), 100, 200)
    assert sorted(rest) == list(range(100))


def test_04_at_the_length_of_the_data_set_the_first_sample_of_the_second_epoch_comes() -> None:
    """streaming#869: 512 samples, resumed at 512."""
    stream = numbers(512)
    places = [stream.place(offset) for offset in range(1025)]
    assert {place.index for place in places[:512]} == set(range(512))
    assert [places[i].epoch for i in (511, 512, 1023, 1024)] == [0, 1, 1, 2]
    second = stream.place(512)
    assert samples(loader_of(numbers(512), sample_offset=512), 1)[0] == second.index


def test_05_the_newer_of_two_states_is_the_later_one() -> None:
    """KempnerForge#57: at 40, not at 10."""
    loader = loader_of(numbers(), micro_batch_size=1)
    samples(loader, 30)
    first = saved(loader)
    again = restored(first, numbers(), micro_batch_size=1)
    samples(again, 10)
    fresh = restored(saved(again), numbers(), micro_batch_size=1)
    assert samples(fresh, 1) == indices(numbers(), 40, 41)
    assert first["sample_offset"] == 30, "a state that was given does not move"


def test_06_after_three_batches_every_rank_goes_on_with_its_fourth() -> None:
    """accelerate#3938: two ranks, no workers; one of them repeated its third."""
    for rank in range(2):
        loader = loader_of(numbers(), rank=rank, ranks=2)
        whole = samples(loader_of(numbers(), rank=rank, ranks=2), 6)
        used = samples(loader, 3)
        fresh = restored(saved(loader), numbers(), rank=rank, ranks=2)
        assert saved(loader)["sample_offset"] == 12
        assert used + samples(fresh, 3) == whole


def test_07_in_a_later_epoch_the_order_is_that_epochs() -> None:
    """accelerate#2016: after a resume it was that of epoch 0."""
    loader = loader_of(numbers(100))
    samples(loader, 70)
    rest = samples(restored(saved(loader), numbers(100)), 30)
    assert rest == indices(numbers(100), 140, 200)
    assert rest != indices(numbers(100), 40, 100)


def test_08_at_the_end_of_an_epoch_the_next_ones_order_begins_with_the_first_batch() -> None:
    """Lightning#21938: with workers that prefetch, the order came an epoch late."""
    fourth = indices(numbers(24), 72, 96)
    assert fourth not in [indices(numbers(24), begin, begin + 24) for begin in (0, 24, 48)]
    with closing(loader_of(numbers(24), workers=2, prefetch_batches=4)) as loader:
        samples(loader, 36)
        state = saved(loader)
        assert samples(loader, 12) == fourth
    with closing(restored(state, numbers(24), workers=2, prefetch_batches=4)) as fresh:
        assert samples(fresh, 12) == fourth


@pytest.mark.parametrize("workers", [0, 1])
def test_09_a_save_inside_the_loop_does_not_use_its_batch_twice(workers: int) -> None:
    """Lightning#19815: saved in the callback of step 10."""
    used, state = [], {}
    with closing(loader_of(numbers(), workers=workers)) as loader:
        for step, batch in enumerate(loader, start=1):
            used += batch.tolist()
            if step == 10:
                state = saved(loader)
                break
    with closing(restored(state, numbers(), workers=workers)) as fresh:
        assert used + samples(fresh, 5) == indices(numbers(), 0, 30)


def test_10_epochs_after_a_resume_in_the_middle_of_one_are_whole() -> None:
    """OLMo#650: resumed at 60 of 100, later epochs began at 60, too."""
    rest = samples(loader_of(numbers(100, epochs=3), sample_offset=60), 120)
    assert rest == indices(numbers(100), 60, 300)
    for begin in (40, 140):
        assert sorted(rest[begin : begin + 100]) == list(range(100))


@pytest.mark.parametrize("workers", [1, 4])
def test_11_workers_and_what_they_prefetched_do_not_count_as_used(workers: int) -> None:
    """lhotse#785: each rank's workers have read ahead of the third micro step when it stops."""
    with all_ranks(mixed(), ranks=2, micro=2, offset=0, workers=workers) as micro_steps:
        used = [sample for _ in range(3) for sample in next(micro_steps)]
    resumed = read(24, ranks=1, micro=3, offset=len(used), workers=workers)
    assert used + resumed == expected(mixed(), 0, 36)


@pytest.mark.parametrize("workers", [0, 1])
def test_12_a_state_is_honoured_by_an_iterator_that_was_there_before(workers: int) -> None:
    """prime-rl#3299: nothing of what the workers had read ahead comes out, and they are gone."""
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


def test_13_another_number_of_steps_changes_no_sample(tmp_path: Path) -> None:
    """gpt-neox#984: the order was laid out for the whole run, and moved with its length."""
    from launcher.builders import build_stream, steps_of

    np.arange(1000, dtype="<u2").tofile(tmp_path / "t.bin")
    streams = []
    for steps in (10, 1000):
        overrides = [
            f"train.steps={steps}",
            "data=tokens",
            f"data.components.tokens.path={tmp_path / 't.bin'}",
            "data.seq_len=16",
            "model.vocab_size=1000",
        ]
        with initialize_config_module("conf", version_base="1.3"):
            run = settings_from(compose("config", overrides=overrides), Path("/"))
        streams.append(build_stream(run))
        assert steps_of(run, streams[-1]) == steps
    streams[1].compare(streams[0].fingerprint())
    places = [[stream.place(offset) for offset in range(200)] for stream in streams]
    assert places[0] == places[1]


def test_14_the_rare_one_of_two_equal_data_sets_goes_through_epochs_of_its_own() -> None:
    """Megatron-LM#705: weights .999 and .001; its index ran over."""
    length = 3
    stream = Stream(
        [
            Component("often", Numbered(length), 0.999),
            Component("rarely", Numbered(length), 0.001),
        ],
        seed=0,
    )
    places = [stream.place(offset) for offset in range(3 * 4096)]
    rare = [place for place in places if place.component == "rarely"]
    assert len(rare) == 12
    assert [place.epoch for place in rare] == [draw // length for draw in range(12)]
    assert Counter(place.index for place in rare) == {0: 4, 1: 4, 2: 4}


def test_15_four_ranks_then_two_then_eight_read_the_same_global_batches() -> None:
    """torchtitan#409."""
    found = [
        read(8, ranks=ranks, micro=8 // ranks, offset=8 * step)
        for step, ranks in enumerate((4, 2, 8))
    ]
    assert list(itertools.chain(*found)) == expected(mixed(), 0, 24)


def test_16_changed_data_are_refused_by_what_changed_and_can_be_accepted() -> None:
    """OLMo-core#617."""
    loader = loader_of(numbers(50))
    samples(loader, 2)
    other = loader_of(numbers(51))
    with pytest.raises(FingerprintMismatch) as raised:
        other.load_state_dict(saved(loader))
    lines = str(raised.value).splitlines()
    at = lines.index("  components.only.samples")
    assert lines[at + 1 : at + 3] == ["    in the checkpoint: 50", "    now:               51"]
    assert "data.accept_changed=true" in lines[-1]
    assert samples(other, 1) == indices(numbers(51), 0, 2), "it is as it was"
    other.load_state_dict(saved(loader), accept_changed=True)
    assert samples(other, 1) == indices(numbers(51), 4, 6)


@pytest.mark.parametrize("workers", [0, 1])
def test_17_generators_that_are_restored_within_an_epoch_do_not_move_the_order(
    workers: int,
) -> None:
    """transgenic#59: a restore of the global generators shuffled the rest of the epoch anew."""
    at_the_start = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with all_ranks(mixed(), ranks=1, micro=2, offset=0, workers=workers) as micro_steps:
        found = [*next(micro_steps), *next(micro_steps)]
        torch.rand(3), np.random.rand(3), random.random()
        random.setstate(at_the_start[0])
        np.random.set_state(at_the_start[1])
        torch.set_rng_state(at_the_start[2])
        found += [*next(micro_steps), *next(micro_steps)]
    assert found == expected(mixed(), 0, 8)


def test_18_a_draw_inside_a_data_set_follows_from_seed_epoch_and_index_alone() -> None:
    """pytorch#5059: workers drew the same numbers, and again in each epoch."""
    length = 8

    def stream(seed: int) -> Stream:
        return Stream([Component("only", Augmented(length))], seed=seed)

    found = {
        workers: read(2 * length, stream(0), ranks=1, micro=2, offset=0, workers=workers)
        for workers in (0, 1, 4)
    }
    wanted = expected(stream(0), 0, 2 * length)
    assert found == dict.fromkeys((0, 1, 4), wanted)
    assert sorted(sample[0] for sample in wanted) == sorted(2 * list(range(length)))
    others = expected(stream(1), 0, 2 * length)
    for generator in (1, 2, 3):
        assert len({sample[generator] for sample in wanted + others}) == 4 * length


@given(offset=st.integers(0, 10**12), ranks=st.integers(1, 5), micro=st.integers(1, 5))
@example(offset=1003, ranks=4, micro=2)
@settings(deadline=None, max_examples=40)
def test_19_an_offset_that_does_not_divide_by_the_ranks_is_continued_exactly(
    offset: int, ranks: int, micro: int
) -> None:
    """Mosaic's StreamingDataset rounds it down to a multiple of the nodes."""
    count = 2 * ranks * micro
    found = read(count, ranks=ranks, micro=micro, offset=offset)
    assert found == expected(mixed(), offset, offset + count)


def planned() -> Stream:
    """`mixed`, with all that a plan can hold: a limit that is reached, stages, skips, an end."""
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


@pytest.mark.parametrize("make", [mixed, planned])
def test_20_restored_at_every_position_over_two_epoch_ends_the_whole_tail_is_the_same(
    make: Callable[[], Stream],
) -> None:
    """grain#1178. With other ranks, micro and global batches and workers each time."""
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
