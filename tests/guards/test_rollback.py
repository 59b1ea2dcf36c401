"""A planted spike in real runs: gone back from, left out, and killed on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.protocol import takeover
from engine.protocol.layout import CheckpointDirectory
from engine.stream import Component, Order, Stream
from tests.guards.planted import LENGTH, POINTS, Counting
from tests.incidents.page import incident
from tests.incidents.shell import NAME, Shell
from tests.launcher.local_runs import bits, records, run
from tests.monitors.curves import MONITORS, assert_one_curve
from tests.seeing.documented import undocumented

pytestmark = pytest.mark.timeout(900)  # many starts, on machines that do other things as well

STEPS = 22
BATCH = 8
BAD = range(15 * BATCH, 17 * BATCH)
"""The samples of steps 16 and 17."""
FIRST, END = 14 * BATCH, 17 * BATCH
WINDOW = f"{FIRST},{END}"
"""Left out: those, and step 15's, which the checkpoint of that step has used."""


def overrides() -> list[str]:
    order = Stream([Component("counting", Counting(poisoned=()))], seed=1234).order
    poisoned = [order.look_up(offset)[1].index for offset in BAD]
    assert len(set(poisoned)) == len(BAD)
    component = (
        "{_target_: tests.guards.planted.Counting, weight: 1, "
        f"poisoned: {json.dumps(poisoned).replace(' ', '')}}}"
    )
    return [
        f"train.steps={STEPS}",
        "optimizer.lr=3e-2",
        "schedule.decay=none",
        "~data.components",
        f"+data.components={{counting: {component}}}",
        "guard.window_steps=8",
        "guard.min_steps=8",
        "guard.threshold=6",
        "guard.skip_steps_before=1",
        "guard.skip_steps_after=1",
    ]


@pytest.fixture(scope="module")
def without_the_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was told from the start to leave the bad samples out."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    code, said = run(directory, *overrides(), f"data.skip=[[{FIRST},{END}]]")
    assert code == 0, said
    return directory


def assert_like(directory: Path, reference: Path) -> None:
    """See that a run ended as if the samples had never been there, and used all others once."""
    assert bits(directory) == bits(reference)
    manifests, passed_over = takeover.committed(CheckpointDirectory(str(directory / "checkpoints")))
    assert passed_over == []
    assert manifests[0].step == STEPS
    stored = manifests[0].fingerprint
    assert isinstance(stored, dict)
    skips = Order.from_json(stored["data"]).skips
    used = [skips.global_index(offset) for offset in range(STEPS * BATCH)]
    expected = [*range(FIRST), *range(END, STEPS * BATCH + END - FIRST)]
    assert used == expected
    assert len(set(used)) == len(used) < LENGTH


def test_a_spike_is_gone_back_from_and_its_samples_are_left_out(
    without_the_samples: Path, tmp_path: Path
) -> None:
    directory, status = tmp_path / "run", tmp_path / "status"
    code, said = run(
        directory,
        *overrides(),
        "guard.on_spike=rollback",
        "guard.max_rollbacks=0",
        EVERSTEP_STATUS_FILE=str(status),
    )
    assert (code, status.read_text()) == (70, "70\n"), said
    assert "guard: the loss of step 16 is" in said
    assert "all of guard.max_rollbacks=0 have been made" in said
    assert f"resume=global_step10 'data.skip=[[{FIRST},{END}]]'" in said
    assert not (directory / "rollbacks.jsonl").exists()
    assert sorted(path.name for path in (directory / "checkpoints").glob("global_step*")) == [
        "global_step10",
        "global_step15",
    ]

    go_back_by_hand(said, directory, tmp_path, without_the_samples)

    # The window of losses comes from the checkpoint: at once it sees what it saw before.
    code, said = run(directory, *overrides(), "guard.on_spike=rollback", MONITORS)
    assert code == 0, said
    assert_one_curve(directory)
    assert undocumented(directory) == []
    assert f"goes back to global_step10, and leaves out the samples {FIRST} to {END}" in said
    assert_like(directory, without_the_samples)
    (rolled_back,) = records(directory, "rollbacks.jsonl")
    assert (rolled_back["step"], rolled_back["to_step"]) == (16, 10)
    assert rolled_back["skip"] == [FIRST, END]
    starts = [r for r in records(directory, "attempts.jsonl") if r["event"] == "start"]
    assert [(r["attempt"], r["from_step"]) for r in starts] == [(0, 0), (1, 15), (2, 10)]
    logs = [(directory / "logs" / f"attempt_000{n}" / "rank_00000.log").read_text() for n in (1, 2)]
    assert "alarm: kind=spike, step=16" in logs[0]
    assert "alarm" not in logs[1], "each attempt has a log of its own"
    (stray,) = (directory / "checkpoints" / ".stray").iterdir()
    assert stray.name.startswith("global_step15."), "it had used samples that are left out"


def go_back_by_hand(said: str, directory: Path, folder: Path, reference: Path) -> None:
    """Do with a copy of a run that the guard has stopped what docs/incidents.md says."""
    page = incident("The loss spikes")
    with Shell(folder, *overrides()) as shell:
        shutil.copytree(directory, shell.run_directory)
        shell.say(f"{said}exit code 70")
        page.assert_seen(shell.evidence())
        stream, diff = page.commands("python")
        batch = shell.run(stream.replace("412", "16"))
        assert all(str(index) in batch for index in BAD[:BATCH]), "the global indices"
        shell.run(diff.replace("400", "10").replace("410", "15"))
        back = page.command("everstep", global_step400="global_step10", **{"6576,6592": WINDOW})
        shell.run(f"{shell.train} {back.partition(NAME)[2]}")
        assert_like(shell.run_directory, reference)


def test_a_run_that_is_only_warned_ends_higher(without_the_samples: Path, tmp_path: Path) -> None:
    code, said = run(tmp_path, *overrides())
    assert code == 0, said
    assert said.count("alarm: kind=spike") == 1, "one for both ranks, and for steps in a row"
    assert bits(tmp_path)[STEPS][0] > bits(without_the_samples)[STEPS][0] + 0.1


def test_a_rollback_that_is_killed_again_and_again_is_right_all_the_same(
    without_the_samples: Path, tmp_path: Path
) -> None:
    directory, fired = tmp_path / "run", tmp_path / "fired"
    fired.mkdir()
    code, said = run(
        directory,
        *overrides(),
        "guard.on_spike=rollback",
        MONITORS,
        "model._target_=tests.guards.planted.KilledInRollback",
        f"+model.fired={fired}",
        f"launch.max_restarts={len(POINTS)}",
        "launch.max_attempts_without_progress=9",
    )
    assert {path.name for path in fired.iterdir()} == set(POINTS)
    assert code == 0, said
    assert_like(directory, without_the_samples)
    assert_one_curve(directory)
    lines = (directory / "rollbacks.jsonl").read_text().splitlines()
    assert [json.loads(line)["skip"] for line in lines[1:]] == [[FIRST, END]], "after the torn one"
