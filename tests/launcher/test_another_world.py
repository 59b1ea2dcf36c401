"""A run that is killed and goes on with other ranks misses nothing and repeats nothing."""

from __future__ import annotations

import json
from pathlib import Path

from engine.stream import Component, Stream
from tests.launcher.audited import SAMPLES, Numbered
from tests.launcher.test_training import records, run
from tests.monitors.curves import MONITORS, assert_one_curve
from tests.seeing.documented import undocumented

GLOBAL_SIZE = 12
MICRO_SIZE = 2
STEPS = SAMPLES // GLOBAL_SIZE
SEED = 1234


def test_a_run_goes_on_with_other_ranks_and_trains_on_every_sample_once_in_order(
    tmp_path: Path,
) -> None:
    directory, audit = tmp_path / "run", tmp_path / "audit"
    audit.mkdir()
    numbered = "{_target_: tests.launcher.audited.Numbered, weight: 1, epochs: 1}"
    overrides = [
        f"+data.components.numbered={numbered}",
        "~data.components.documentation",
        "~data.components.sources",
        "model._target_=tests.launcher.audited.AuditedGPT",
        f"+model.audit={audit}",
        f"batch.global_size={GLOBAL_SIZE}",
        f"batch.micro_size={MICRO_SIZE}",
        f"train.steps={STEPS}",
        "checkpoint.every_steps=4",
        MONITORS,
    ]
    trained: list[list[int]] = []
    for ranks, until, dies_in in ((2, 8, 10), (3, 12, 15), (1, STEPS, None)):
        from_step = len(trained)
        per_step = GLOBAL_SIZE // (MICRO_SIZE * ranks)  # forward passes
        (audit / "die_at").unlink(missing_ok=True)
        if dies_in is not None:
            (audit / "die_at").write_text(str((dies_in - from_step - 1) * per_step + 2))
        code, said = run(directory, *overrides, f"launch.ranks={ranks}")
        assert (code == 0) == (dies_in is None), said
        assert f"on {ranks} ranks" in said
        trained += _batches(audit, ranks, per_step)[: until - from_step]

    order = [number for batch in trained for number in batch]
    stream = Stream([Component("numbered", Numbered(), 1.0, 1)], seed=SEED)
    assert order == [stream.place(offset).index for offset in range(SAMPLES)]
    assert sorted(order) == list(range(SAMPLES))

    attempts = records(directory, "attempts.jsonl")
    assert [a["world_size"] for a in attempts if a["event"] == "bring_up"] == [2, 3, 1]
    assert [a["from_step"] for a in attempts if a["event"] == "start"] == [0, 8, 12]
    resumed = [e for e in records(directory, "events.jsonl") if e["event"] == "resumed"]
    assert [(e["saved_by_ranks"], e["ranks"]) for e in resumed] == [(2, 3), (3, 1)]
    assert_one_curve(directory)
    assert undocumented(directory) == []


def _batches(audit: Path, ranks: int, per_step: int) -> list[list[int]]:
    """Return the samples of each finished step of the attempt with so many ranks, in order."""
    notes = []
    for rank in range(ranks):
        lines = (audit / f"rank{rank}_of{ranks}").read_text().splitlines()
        notes.append([json.loads(line) for line in lines])
    micro_steps = list(zip(*notes, strict=False))  # a killed attempt leaves the last one unfinished
    steps = range(0, len(micro_steps) - per_step + 1, per_step)
    return [
        [number for micro in micro_steps[at : at + per_step] for part in micro for number in part]
        for at in steps
    ]


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(tmp_path: Path) -> None:
    code, said = run(tmp_path / "run", "launch.ranks=3")
    assert code == 78
    assert "batch.global_size=8" in said
    assert "Traceback" not in said
