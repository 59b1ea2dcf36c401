"""One run that a person goes wrong with, in the order of a bad day, and each time puts right."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from engine.checkpoint import preflight
from launcher import same_run
from launcher.errors import ConfigError
from tests import run_processes, tiny_run
from tests.incidents.page import incident
from tests.incidents.shell import Shell
from tests.launcher.test_same_run import saved_at, settings, stream

pytestmark = pytest.mark.timeout(1800)  # many starts, on machines that do other things as well


def test_what_is_done_to_a_run_is_seen_said_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["everstep"])  # composed here, in `the_data_are_wrong`
    with Shell(tmp_path) as shell:
        two_runs_in_one_directory_and_one_of_them_killed(shell)
        the_checkpoints_are_not_there(shell)
        a_stop_file_is_there(shell)
        the_data_are_wrong(shell)
        a_checkpoint_is_damaged_and_all_of_it_moved(shell, tmp_path / "elsewhere")


def two_runs_in_one_directory_and_one_of_them_killed(shell: Shell) -> None:
    first = shell.start_training()
    assert "running on this host" in shell.run("everstep status runs/NAME")
    shell.run(f"{shell.train} train.steps=100000", 78)
    incident("Two runs in one directory").assert_seen(shell.evidence())

    steps = shell.newest_step
    shell.wait(lambda: shell.newest_step > steps, "goes on undisturbed")
    os.kill(run_processes.trainers_by_rank(shell.run_directory)[1], signal.SIGKILL)
    shell.end(first, 137)
    shell.say(preflight._lack_of_memory([1 << 60, 1 << 60]))
    incident("A rank is killed").assert_seen(shell.evidence())


def the_checkpoints_are_not_there(shell: Shell) -> None:
    page = incident("The checkpoints are not there")
    before = len(tiny_run.events(shell.run_directory, "committed"))
    run = shell.start_training()
    shell.wait(
        lambda: len(tiny_run.events(shell.run_directory, "committed")) > before, "goes on to save"
    )
    directory = shell.run_directory / "checkpoints"
    away = directory.rename(shell.folder / "away")
    assert "3 saves in a row have failed" in shell.end(run, 1)
    shell.run(f"{shell.train} train.steps=100000", 78)
    page.assert_seen(shell.evidence())
    away.rename(directory)


def a_stop_file_is_there(shell: Shell) -> None:
    page = incident("A STOP file is there")
    run = shell.start_training()
    shell.run(incident("Two runs in one directory").command("touch"))
    shell.end(run, 0)
    assert not (shell.run_directory / "STOP").exists()
    shell.run(incident("It has to move").command("touch"))
    shell.run(shell.train, 78)
    page.assert_seen(shell.evidence())
    shell.run(page.command("rm"))


def the_data_are_wrong(shell: Shell) -> None:
    page = incident("The data are wrong")
    steps = f"train.steps={shell.newest_step + 5}"
    with pytest.raises(ConfigError) as refused:
        same_run.check(saved_at(80), settings("data.seq_len=16"), stream())
    shell.say(str(refused.value))
    shell.run(f"{shell.train} {steps} data.skip=[[0,8]]", 78)
    shell.run(f"python -m engine stream runs/NAME --step {shell.newest_step}")
    page.assert_seen(shell.evidence())
    assert "data.accept_changed=true" in page.parts["To do"]
    shell.run(f"{shell.train} {steps} data.skip=[[0,8]] data.accept_changed=true")


def a_checkpoint_is_damaged_and_all_of_it_moved(shell: Shell, other_place: Path) -> None:
    newest = shell.newest_step
    shard = shell.run_directory / "checkpoints" / f"global_step{newest}"
    with (shard / "rank_00001_of_00002.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    shell.run("python -m engine verify runs/NAME --all", 1)
    (other_place / "runs").mkdir(parents=True)
    shell.run(incident("It has to move").command("cp"))
    moved = Shell(other_place)
    for path in moved.run_directory.iterdir():
        if path.name != "checkpoints":  # records may be missing
            shell.run(shlex.join(["rm", "-r", str(path)]))
    moved.run(f"{moved.train} train.steps={newest + 5} data.skip=[[0,8]]")
    incident("A checkpoint is damaged").assert_seen(shell.evidence() + moved.evidence())
    moved.run("python -m engine verify runs/NAME --all")
    assert moved.newest_step == newest + 5
