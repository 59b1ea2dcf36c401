"""Reported cases that take a Slurm, by number, and each way in which a job ends; see also
tests/launcher/test_reports.py.

Real jobs that train, submitted by `launch=slurm` or started by `launch=srun`. `life` is one job
that is preempted, loses a node and is cancelled. The batch script's own decisions, with stand-ins
for the ranks, are in test_train_sbatch.py, the tenth (no `scontrol`, or a failing one) among them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.slurm_job import TimeLimit
from tests import tiny_run
from tests.seeing.documented import undocumented
from tests.slurm.cluster import SlurmCluster
from tests.slurm.cluster_job import Job, wait_for

LAUNCHER = (sys.executable, "-m", "launcher")
SECONDS = 300  # for a job to start, import torch and take a step on a busy machine

pytestmark = pytest.mark.timeout(900)


def submit(cluster: SlurmCluster, *arguments: str, cwd: Path) -> tuple[str, str]:
    """Submit by `launch=slurm`; return the job's id and what was said."""
    done = cluster.run(
        *(*LAUNCHER, *arguments, "launch=slurm"),
        environment=tiny_run.environment(),
        cwd=cwd,
        seconds=SECONDS,
    )
    words = done.stdout.split()
    assert words[0] == "submitted", done.stdout
    return words[words.index("job" if "job" in words else "array") + 1].rstrip(":"), done.stdout


def attempts(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / "attempts.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def wait_until_it_trains(job: Job, run: Path, attempt: int) -> None:
    def trains() -> bool:
        path = run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return bool(whole) and json.loads(whole[-1])["attempt"] == attempt

    job.wait_until(trains, f"trains in attempt {attempt}", SECONDS)


@pytest.fixture(scope="module")
def life(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path, str]:
    """A job that was preempted, had a node set down, and was cancelled; its run; its last state."""
    directory = tmp_path_factory.mktemp("life")
    run = directory / "run"
    size = ["launch.nodes=2", "launch.ranks_per_node=1", "launch.cpus_per_rank=4"]
    endless = [*tiny_run.arguments(run), "train.steps=100000"]
    number, _ = submit(slurm, *endless, *size, cwd=directory)
    job = Job(slurm, number, run / "submitted" / "0000" / f"{number}.log")
    wait_until_it_trains(job, run, 0)
    slurm.srun("--partition=urgent", "--cpus-per-task=4", "true", seconds=SECONDS)
    job.wait_until_restarted(1, SECONDS)
    wait_until_it_trains(job, run, 1)
    node = f"NodeName={slurm.nodes[1]}"
    slurm.run("scontrol", "update", node, "State=DOWN", "Reason=test")
    job.wait_until(lambda: job.restarts == 2, "is requeued", SECONDS)
    slurm.run("scontrol", "update", node, "State=RESUME", check=False)  # or it came by itself
    job.wait_until_restarted(2, SECONDS)
    wait_until_it_trains(job, run, 2)
    job.cancel()
    return job, run, job.wait_until_ended(SECONDS)


def test_8_scancel_ends_promptly_and_for_good(life: tuple[Job, Path, str]) -> None:
    """SIGTERM is not swallowed for ever, and the job is not brought back to life."""
    job, run, state = life
    assert state == "CANCELLED"
    assert job.restarts == 2
    assert "cancelled: not requeued" in job.output
    *_, last = attempts(run, "end")
    assert (last["exit_code"], last["cause"]) == (75, "SIGTERM (cancelled)")
    assert (run / "checkpoints" / f"global_step{last['step']}").is_dir()


def test_13_every_start_of_a_job_finds_the_same_directory(life: tuple[Job, Path, str]) -> None:
    """lightning-hydra-template#146: a requeue composes a directory with a new time stamp."""
    job, run, _ = life
    started = attempts(run, "start")
    ended = attempts(run, "end")
    assert [record["attempt"] for record in started] == [0, 1, 2], job.output
    assert [record["from_step"] for record in started[1:]] == [e["step"] for e in ended[:2]]
    assert {record["slurm_job"] for record in attempts(run, "bring_up")} == {job.id}
    assert undocumented(run) == []


def test_a_preempted_job_and_one_that_lost_a_node_say_so(life: tuple[Job, Path, str]) -> None:
    """Slurm 22.05 tells the two apart only where a preempted job has a grace time."""
    _, run, _ = life
    causes = [record["cause"] for record in attempts(run, "end")]
    assert causes[:2] == ["SIGTERM (requeued by Slurm)"] * 2


def test_11_a_task_of_an_array_is_requeued_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Lightning#15022: the last task's own job id is the array's. Here a sweep is the array."""
    size = ["launch.nodes=1", "launch.ranks_per_node=1"]
    sweep = ["-m", "experiment=tiny", "seed=1,2", f"train.steps={tiny_run.STEPS}"]
    number, said = submit(slurm, *sweep, *size, cwd=tmp_path)
    assert "2 runs as the array" in said
    runs = [tmp_path / "runs" / f"tiny_seed-{seed}" for seed in (1, 2)]
    log = runs[0] / "submitted" / "0000"
    first, last = (Job(slurm, f"{number}_{n}", log / f"{number}_{n}.log") for n in (0, 1))
    wait_until_it_trains(last, runs[1], 0)
    last.cancel("--signal=USR2")
    assert [job.wait_until_ended(SECONDS) for job in (first, last)] == ["COMPLETED"] * 2
    assert [job.restarts for job in (first, last)] == [0, 1], last.output
    assert [len(attempts(run, "start")) for run in runs] == [1, 2]


def test_a_job_whose_time_is_nearly_over_stops_without_a_signal(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Each start is asked for the step that it always gets; the whole limit is called near."""
    run = tmp_path / "run"
    limit = ["launch.time=10:00", "launch.stop_before_end_seconds=600"]
    size = ["launch.nodes=2", "launch.ranks_per_node=1"]
    steps = ["experiment=tiny", f"run.dir={run}", "train.steps=2"]
    number, _ = submit(slurm, *steps, *size, *limit, cwd=tmp_path)
    job = Job(slurm, number, run / "submitted" / "0000" / f"{number}.log")
    assert job.wait_until_ended(SECONDS) == "COMPLETED", job.output
    assert job.restarts == 1
    ended = attempts(run, "end")
    assert (ended[0]["step"], ended[0]["cause"]) == (1, TimeLimit.CAUSE)
    assert (ended[1]["step"], ended[1]["exit_code"]) == (2, 0)


def test_a_stop_of_launch_srun_reaches_the_ranks_as_no_sigterm(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A SIGTERM to srun kills its tasks within 60 ms: no save would be committed."""
    run = tmp_path / "run"
    endless = [*tiny_run.arguments(run), "train.steps=100000", "launch=srun"]
    with subprocess.Popen(
        ["salloc", "--nodes=2", "--ntasks=2", *LAUNCHER, *endless],
        env=slurm.environment | tiny_run.environment(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as salloc:
        wait_for(lambda: tiny_run.steps_done(run) >= 3, SECONDS, "trains")
        (starter,) = Path(f"/proc/{salloc.pid}/task/{salloc.pid}/children").read_text().split()
        os.kill(int(starter), signal.SIGTERM)
        said, _ = salloc.communicate(timeout=SECONDS)
    assert salloc.returncode == 75, said
    (ended,) = attempts(run, "end")
    assert ended["cause"] in ("SIGUSR2", "SIGTERM"), "by srun, or by the file"
    assert (run / "checkpoints" / f"global_step{ended['step']}").is_dir()
    assert not list((run / ".starters").iterdir())


def test_26_no_scontrol_on_the_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Ranks that cannot find each other fail loudly; never N worlds of one rank."""
    (tmp_path / "bin").mkdir()
    done = slurm.srun(
        *(*LAUNCHER, *tiny_run.arguments(tmp_path / "run")),
        check=False,
        environment=tiny_run.environment() | {"PATH": str(tmp_path / "bin")},
        cwd=tmp_path,
        seconds=SECONDS,
    )
    assert done.returncode != 0
    assert "cannot find the address of Slurm node" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
