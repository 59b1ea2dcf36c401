"""What people reported of starting, stopping and coming back, elsewhere: here each does not happen.

One test for each case, named by its number in the list of cases; the reports are in the docstrings.
Those that take a Slurm are in tests/slurm/test_reports.py. Real processes, real signals, real sshd
and pdsh. Several cases share one run: `life`, `over_ssh` and `sweep` are made once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import requeue, watchdog
from launcher.config import missing_data_files
from tests import daemons, run_processes, tiny_run
from tests.distributed.ssh_hosts import HOSTS, SshHosts
from tests.launcher import local_runs
from tests.launcher.test_config import compose, refusal
from tests.seeing.documented import undocumented
from tests.slurm.cluster_job import wait_for

LAUNCHER = (sys.executable, "-m", "launcher")

pytestmark = pytest.mark.timeout(900)  # several starts of a run, each of which imports torch


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What composing in this process leaves behind."""
    monkeypatch.setattr(sys, "argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def start(run: Path, *overrides: str, **environ: str) -> subprocess.Popen[str]:
    """Start the tiny run of `tests.tiny_run` here, with its processes marked."""
    return subprocess.Popen(
        [*LAUNCHER, *tiny_run.arguments(run), *overrides],
        env=os.environ | tiny_run.environment() | {run_processes.MARK: str(run)} | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_first_step(process: subprocess.Popen[str]) -> str:
    """Read a run's output up to the first step that it tells of, and return it."""
    assert process.stdout is not None
    said = ""
    while not (line := process.stdout.readline()).startswith("step "):
        assert line, f"ended before its first step:\n{said}"
        said += line
    return said


def attempts(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / "attempts.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


@dataclasses.dataclass
class Life:
    """One run of four attempts, each ended in another way, and what each said."""

    run: Path
    said: list[str] = dataclasses.field(default_factory=list)
    codes: list[int] = dataclasses.field(default_factory=list)
    survivors: list[int] = dataclasses.field(default_factory=list)

    def take(self, process: subprocess.Popen[str], before: str = "") -> None:
        said, _ = process.communicate()
        self.said.append(before + said)
        self.codes.append(process.returncode)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    run = tmp_path_factory.mktemp("life") / "run"
    # Rank 1 gets a SIGTERM inside a forward pass; once, for the file is there afterwards.
    fault = local_runs.faulty("terminate", rank=1, at_forward=15, fired=run.with_name("fired"))
    life = Life(run)
    life.take(start(run, *fault, "data.workers=1"))

    (run / "checkpoints" / "global_step40000").mkdir()
    second = start(run, *fault, "data.workers=1", "checkpoint.keep_last=3")
    before = wait_for_first_step(second)
    for pid in daemons.marked(run_processes.MARK, run):
        os.kill(pid, signal.SIGTERM)
    life.take(second, before)

    third = start(run, *fault, "launch.grace_seconds=5")
    before = wait_for_first_step(third)
    os.kill(run_processes.trainers_by_rank(run)[0], signal.SIGKILL)
    life.take(third, before)
    life.survivors = run_processes.trainers(run)

    life.take(start(run, *fault))
    return life


@dataclasses.dataclass
class OverSsh:
    """A run by `launch=deepspeed`: whole, then one host's rank killed, then stopped, then done."""

    run: Path
    codes: list[int] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)


NASTY = """run.name='{"a": [1, 2]} ${oc.env:HOME} $(id) `id` \\\\"x\\\\" it; is'"""


@pytest.fixture(scope="module")
def over_ssh(ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverSsh]:
    run = tmp_path_factory.mktemp("over_ssh") / "run"
    result = OverSsh(run)
    arguments = [
        *(*LAUNCHER, *tiny_run.arguments(run), NASTY, "launch=deepspeed"),
        f"launch.hostfile={ssh_hosts.hostfile}",
        f"launch.master_addr={HOSTS[0]}",
    ]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            arguments,
            env=ssh_hosts.environment | tiny_run.environment(),
            cwd=run.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(process: subprocess.Popen[str]) -> None:
        said, _ = process.communicate(timeout=400)
        result.said.append(said)
        result.codes.append(process.returncode)

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOSTS[0], 29500))  # DeepSpeed's default port
        taken.listen()
        first = begin()
        wait_for(lambda: tiny_run.steps_done(run) >= 3, 120, "trains over ssh")
        victim = next(
            pid
            for pid in daemons.marked("EVERSTEP_TEST_HOST", HOSTS[1])
            if run_processes.is_trainer(pid)
        )
        os.kill(victim, signal.SIGKILL)
        finish(first)
    second, done = begin(), tiny_run.steps_done(run)
    wait_for(lambda: tiny_run.steps_done(run) > done, 120, "trains on")
    second.terminate()
    finish(second)
    finish(begin())
    yield result
    shutil.rmtree(run)


def test_1_local_rank_argument(over_ssh: OverSsh) -> None:
    """fairseq#4164: DeepSpeed starts the script with --local_rank=0 and Hydra rejects it."""
    assert {record["started_by"] for record in attempts(over_ssh.run, "bring_up")} == {"deepspeed"}
    assert over_ssh.codes[-1] == 0, over_ssh.said[-1]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("runner", signal.SIGTERM, id="a TERM that the runner does not pass on"),
        pytest.param("launch", signal.SIGUSR1, id="a USR1 that kills the launcher of the node"),
        pytest.param("launch", signal.SIGKILL, id="the launcher of the node is killed"),
    ],
)
def test_2_a_signal_that_reaches_only_deepspeeds_starter(
    victim: str, number: signal.Signals, tmp_path: Path
) -> None:
    """DeepSpeed 0.19.8 leaves its ranks alone in the world, and may exit with 0."""
    runner = _start_deepspeed(tmp_path, "train.steps=100000")
    launch, keepers, trainers = _processes(runner)
    ends = [os.pidfd_open(pid) for pid in (*keepers, *trainers)]
    os.kill(runner.pid if victim == "runner" else launch, number)
    runner.communicate()  # until every process that could write has ended
    for end in ends:
        assert select.select([end], [], [], 60)[0], "a process of the run lives on"
        os.close(end)
    *_, record = attempts(tmp_path, "end")
    assert (record["exit_code"], record["cause"]) == (75, "SIGTERM")
    assert (tmp_path / "checkpoints" / f"global_step{record['step']}").is_dir()


def test_2_a_signal_that_reaches_only_our_starter_of_several_hosts(over_ssh: OverSsh) -> None:
    """The same over pdsh: where DeepSpeed would `pkill -f`, the ranks save."""
    assert over_ssh.codes[1] == 75, over_ssh.said[1]
    *_, stopped, _ = attempts(over_ssh.run, "end")
    assert (stopped["exit_code"], stopped["cause"]) == (75, "SIGTERM")
    assert stopped["step"] > stopped["from_step"]


def test_3_a_save_that_takes_longer_than_the_starters_patience(tmp_path: Path) -> None:
    """pytorch#119856: after 30 s DeepSpeed's launcher kills what it has sent a SIGTERM."""
    # A shard of this run has 280 kB: 40 s.
    slow = ["checkpoint.max_bytes_per_second=7000", "checkpoint.every_steps=1000000"]
    runner = _start_deepspeed(tmp_path, "train.steps=100000", *slow)
    launch, keepers, _ = _processes(runner)
    ends = [os.pidfd_open(pid) for pid in keepers]
    os.kill(launch, signal.SIGTERM)
    runner.communicate()
    assert runner.returncode != 0
    for end in ends:
        select.select([end], [], [], 120)
        os.close(end)
    wait_for(lambda: [*(tmp_path / "checkpoints").glob("global_step*")], 120, "commits")
    tags = list((tmp_path / "checkpoints").glob("global_step*"))
    assert (tags[0] / "manifest.json").exists()
    (staged,) = tiny_run.events(tmp_path, "staged")
    assert tags[0].name == f"global_step{staged['step']}"


def test_4_a_signal_in_the_middle_of_a_forward_pass(life: Life) -> None:
    """Lightning#21406: the handler sets a flag only; the checkpoint is at a step edge."""
    assert life.codes[0] == 75, life.said[0]
    stopped = attempts(life.run, "end")[0]
    assert stopped["step"] in (8, 9)  # two forward passes a step: it came in the first of the 8th
    assert f"stopped at step {stopped['step']}" in life.said[0]


def test_5_one_rank_is_signalled(life: Life) -> None:
    """Lightning#20806: all stop at the same step, with no deadlock. It was rank 1."""
    assert attempts(life.run, "end")[0]["cause"] == "another rank was asked to stop"
    assert attempts(life.run, "start")[1]["from_step"] == attempts(life.run, "end")[0]["step"]


def test_6_a_signal_for_everything_while_data_workers_run(life: Life) -> None:
    """KempnerForge#177: workers, keepers and writers get it as well; the checkpoint is written."""
    assert life.codes[1] == 75, life.said[1]
    assert attempts(life.run, "start")[2]["from_step"] == attempts(life.run, "end")[1]["step"]


def test_7_a_tag_without_a_manifest(life: Life) -> None:
    """A directory that a save left half-made is skipped, and that is said."""
    assert "global_step40000" in life.said[1]
    assert tiny_run.events(life.run, "passed_over")
    assert "resumes at step" in life.said[1]


def test_9_rank_0_is_killed(life: Life) -> None:
    """submitit#1780: the other ranks and their workers live on. Here nothing does."""
    assert life.codes[2] not in requeue.VERDICTS
    assert life.survivors == []
    assert "rank 0 failed first: it was ended by SIGKILL" in life.said[2]


def test_12_resume_auto_on_a_first_start(life: Life) -> None:
    """Lightning#20347: nothing to resume from is no error."""
    assert "attempt 0: starts" in life.said[0]


def test_14_ranks_that_start_apart(tmp_path: Path) -> None:
    """Lightning#5512: six seconds apart they made two run directories. Here rank 1 waits first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def rank(number: int) -> subprocess.Popen[str]:
        variables = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        variables |= {"RANK": number, "LOCAL_RANK": number}
        environ = {name: str(value) for name, value in variables.items()}
        run = tmp_path / "runs" / "one"
        return start(run, "train.steps=3", MASTER_ADDR="127.0.0.1", **environ)

    late = rank(1)
    # It knocks before anybody is there: half a connection, or its trainer has at least begun.
    wait_for(lambda: run_processes.trainers(tmp_path / "runs" / "one"), 60, "rank 1 starts")
    first = rank(0)
    for process in (first, late):
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]
    assert len(attempts(tmp_path / "runs" / "one", "start")) == 1


def test_15_the_first_configuration_is_kept_and_every_attempt_has_a_record(life: Life) -> None:
    """The second start in a directory overwrites what the first was made from."""
    assert "keep_last: 2" in (life.run / "config.yaml").read_text()
    overrides = [record["overrides"] for record in attempts(life.run, "bring_up")]
    assert len(overrides) == 4
    assert ["checkpoint.keep_last=3" in words for words in overrides] == [False, True, False, False]
    changed = [record["changed"] for record in attempts(life.run, "start")]
    kept = "checkpoint.keep_last was {} in the attempt before and is {} now"
    assert kept.format(2, 3) in changed[1]
    assert kept.format(3, 2) in changed[2]
    assert f"note: {kept.format(2, 3)}." in life.said[1]


def test_all_of_it_gave_the_bits_of_a_run_that_nothing_disturbed(life: Life) -> None:
    assert life.codes[3] == 0, life.said[3]
    assert tiny_run.losses(life.run) == tiny_run.reference_losses()
    assert undocumented(life.run) == []


def test_16_a_sweep_makes_separate_runs_and_goes_on_when_it_is_given_again(
    tmp_path: Path,
) -> None:
    """Lightning#11617: `-m batch.micro_size=1,2` with two ranks."""
    arguments = ["-m", "experiment=tiny", "batch.micro_size=1,2", "train.steps=12"]
    environ = os.environ | tiny_run.environment() | {run_processes.MARK: str(tmp_path)}

    def sweep() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*LAUNCHER, *arguments, "launch.ranks=2"],
            env=environ,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    first = sweep()
    wait_for_first_step(first)
    first.terminate()
    first.communicate()
    assert first.returncode == 75
    runs = [tmp_path / "runs" / f"tiny_batch.micro_size-{size}" for size in (1, 2)]
    assert not runs[1].exists(), "a sweep that is asked to stop starts no other run"
    said, _ = (second := sweep()).communicate()
    assert second.returncode == 0, said
    assert [attempts(run, "end")[-1]["step"] for run in runs] == [12, 12]
    assert attempts(runs[0], "start")[1]["from_step"] > 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {run.name for run in runs}


def test_16_runs_that_would_share_a_directory_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LAUNCHER, "-m", "seed=1,2", "run.dir=one", "launch.ranks=2"],
        env=os.environ | tiny_run.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert "'run.dir=runs/${run.name}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_17_a_relative_data_path(
    chdir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hydra#2414: it is relative to the launch, whether Hydra changes the directory or not."""
    monkeypatch.chdir(tmp_path)
    path = "data.components.tokens.path=corpus/tokens.bin"
    settings = compose("data=tokens", path, f"hydra.job.chdir={chdir}")
    wanted = str(tmp_path / "corpus" / "tokens.bin")
    assert settings.data.components["tokens"]["path"] == wanted
    assert missing_data_files(settings) == [
        f"data.components.tokens.path={wanted}: there is no such file."
    ]
    assert list(tmp_path.iterdir()) == []  # composing leaves nothing behind


def test_18_a_typo_is_one_error_from_one_rank(tmp_path: Path) -> None:
    """Under a starter that knows nothing of settings every rank finds it; one speaks."""
    runner = _start_deepspeed(tmp_path / "run", "checkpoint.every_step=5", wait=False)
    said, _ = runner.communicate()
    assert runner.returncode != 0
    assert said.count("unknown setting 'checkpoint.every_step'. Did you mean 'every_steps'?") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.path=/a/b=c", ["'data.path=/a/b=c'", """'data.path="/a/b=c"'"""]),
        ("checkpoint.every_minutes=10m", ["checkpoint.every_minutes", "'10m'", "no unit"]),
        ("train.steps=08", ["train.steps", "'08'", "write 8"]),
        ("checkpoint.every_steps=none", ["checkpoint.every_steps=null"]),
        ("launch.srun_options=[--a=b]", ["""'launch.srun_options=["--a=b"]'"""]),
    ],
)
def test_19_values_that_the_command_line_makes_something_else_of(
    override: str, parts: list[str]
) -> None:
    message = refusal(override)
    for part in parts:
        assert part in message


def test_20_sizes_that_do_not_divide(tmp_path: Path) -> None:
    """DeepSpeed#6914: refused before anything starts, with the nearest values that work."""
    code, said = local_runs.run(tmp_path / "run", "batch.global_size=7")
    assert code == 78
    assert said.startswith("everstep: batch.global_size=7")
    assert "batch.global_size that fits: 4 or 8" in said
    assert not (tmp_path / "run").exists()


def test_21_auto_in_deepspeeds_settings() -> None:
    """It is a word of Hugging Face's integrations; DeepSpeed itself fails on it, deep inside."""
    message = refusal("deepspeed.zero_optimization.reduce_bucket_size=auto")
    assert 'deepspeed.zero_optimization.reduce_bucket_size="auto"' in message


def test_22_a_typo_that_deepspeed_would_accept() -> None:
    message = refusal("deepspeed.gradient_clippin=1.0")
    assert "deepspeed.gradient_clippin" in message
    assert "'gradient_clipping'" in message


def test_23_a_value_that_shells_would_change_arrives_byte_for_byte(over_ssh: OverSsh) -> None:
    """pdsh hands the command line to a shell on each host."""
    for record in attempts(over_ssh.run, "bring_up"):
        assert NASTY in record["overrides"]


def test_24_one_hosts_rank_is_killed(over_ssh: OverSsh) -> None:
    """DeepSpeed#5005: one node runs out of memory; all nodes exit, with a code that is not 0."""
    assert over_ssh.codes[0] not in requeue.VERDICTS, over_ssh.said[0]
    assert tiny_run.losses(over_ssh.run) == tiny_run.reference_losses()


def test_25_the_port_is_taken(over_ssh: OverSsh) -> None:
    """gpt-neox#768: another is chosen, and all ranks agree. It was taken during the first start."""
    assert attempts(over_ssh.run, "start")[0]["from_step"] == 0
    assert tiny_run.steps_done(over_ssh.run) == tiny_run.STEPS


def test_a_host_that_does_not_answer_is_named(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{HOSTS[0]} slots=1\n127.0.0.9 slots=1\n")
    done = subprocess.run(
        [*LAUNCHER, "experiment=tiny", "launch=deepspeed", f"launch.hostfile={hostfile}"],
        env=ssh_hosts.environment | tiny_run.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, "it may answer again: not a matter of the settings"
    lines = done.stderr.splitlines()
    assert lines[0] == f"everstep: 1 of 2 hosts in {hostfile} cannot be used:"
    assert lines[1].startswith("  127.0.0.9: does not answer: ")
    assert not (tmp_path / "runs").exists()


def test_27_a_save_has_a_limit_of_its_own() -> None:
    """FlagScale#1267: a long save trips the watchdog that watches steps."""
    now = [0.0]
    ended: list[str] = []
    limits = {"step": watchdog.Limit(10, "step"), "save": watchdog.Limit(1000, "save")}
    dog = watchdog.Watchdog(limits, ended.append, clock=lambda: now[0])
    with dog.phase("save"):
        now[0] = 500
        dog.look()
    assert ended == []
    with dog.phase("step"):
        now[0] = 511
        dog.look()
    assert len(ended) == 1


def test_28_crashes_without_progress_come_to_an_end(tmp_path: Path) -> None:
    """A run that always dies at the same step is started again for ever.

    (That preemptions with progress are not counted is in test_requeue.py.)
    """
    fault = local_runs.faulty("raise_always", rank=1, at_forward=1, fired=tmp_path / "fired")
    limits = ["launch.max_attempts_without_progress=2", "launch.max_restarts=9"]
    process = start(tmp_path / "run", *fault, *limits)
    said, _ = process.communicate()
    assert process.returncode == 70, said
    assert "the last 2 attempts all began at step 0 and ended without a newer checkpoint" in said


def _start_deepspeed(run: Path, *overrides: str, wait: bool = True) -> subprocess.Popen[str]:
    """Start two local ranks by plain `deepspeed`; wait for the first step."""
    runner = subprocess.Popen(
        [
            *(Path(sys.executable).with_name("deepspeed"), "--num_accelerators=2"),
            *("--module", "launcher", "experiment=tiny", f"run.dir={run}", *overrides),
        ],
        env=os.environ
        | tiny_run.environment()
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if wait:
        wait_for_first_step(runner)
    return runner


def _processes(runner: subprocess.Popen[str]) -> tuple[int, list[int], list[int]]:
    """Return the pids of DeepSpeed's launcher, of the keepers and of the trainers."""
    (launch,) = _children(runner.pid)
    keepers = _children(launch)
    assert len(keepers) == 2
    return launch, keepers, [pid for keeper in keepers for pid in _children(keeper)]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
