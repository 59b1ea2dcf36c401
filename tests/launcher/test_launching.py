"""The choices of `launch`: what is read, checked and rendered before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import (
    frozen,
    hosts,
    launch_slurm,
    launch_srun,
    overrides,
    sbatch_script,
    sweep,
    train,
)
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.launch_settings import DeepSpeedLaunch, SlurmLaunch, SrunLaunch, seconds_of
from launcher.starter_link import LOST_SECONDS, RankSide, StarterSide
from tests.launcher.test_config import compose, refusal

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def slurm(*words: str) -> SlurmLaunch:
    launch = compose("launch=slurm", "launch.ranks_per_node=8", *words).launch
    assert isinstance(launch, SlurmLaunch)
    return launch


def over_ssh(hostfile: Path, *words: str) -> DeepSpeedLaunch:
    launch = compose("launch=deepspeed", f"launch.hostfile={hostfile}", *words).launch
    assert isinstance(launch, DeepSpeedLaunch)
    return launch


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["launch.kind=ssh"], ["launch.kind", "'ssh'", "local, deepspeed, srun, slurm"]),
        (["launch.hostfile=x"], ["'launch.hostfile'. It comes with launch=deepspeed."]),
        (["launch.nodes=2"], ["It comes with launch=deepspeed, launch=slurm or launch=srun."]),
        (["launch=deepspeed"], ["launch.hostfile is not set"]),
        (["launch=slurm"], ["launch.ranks_per_node is not set"]),
        (["launch=slurm", "launch.ranks_per_node=0"], ["launch.ranks_per_node=0", "1 or more"]),
        (
            ["launch=slurm", "launch.ranks_per_node=1", "launch.time=90"],
            ["launch.time", "90", """"launch.time='90'\""""],
        ),
        (
            ["launch=slurm", "launch.ranks_per_node=1", "launch.time=soon"],
            ["launch.time='soon'", "24:00:00"],
        ),
        (
            ["launch=slurm", "launch.ranks_per_node=1", "launch.time=2:30"],
            ["launch.time=2:30 is 150 s", "wanted 180 s or more"],
        ),
        (
            ["launch=slurm", "launch.ranks_per_node=1", "launch.container_runtime=docker"],
            ["launch.container_runtime", "'docker'", "pyxis, apptainer"],
        ),
        (
            ["launch=slurm", "launch.ranks_per_node=1", "launch.sbatch_options=[constraint]"],
            ["launch.sbatch_options", "'constraint'"],
        ),
        (["launch.stop_before_end_seconds=-1"], ["launch.stop_before_end_seconds=-1"]),
    ],
)
def test_a_mistake_in_how_to_launch(arguments: list[str], parts: list[str]) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-00:00:05", 86405),
    ],
)
def test_slurms_forms_of_a_time(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_the_script_of_a_job(tmp_path: Path) -> None:
    launch = slurm(
        "launch.nodes=2",
        "launch.gpus_per_node=8",
        "launch.cpus_per_rank=7",
        "launch.time=24:00:00",
        "launch.partition=gpu",
        "launch.account=me",
        "launch.qos=high",
        "launch.modules=[cuda/12.4, gcc]",
        "launch.setup=[ulimit -n 65536]",
        'launch.sbatch_options=["--constraint=a100"]',
        "launch.container=/images/a b.sif",
        "launch.container_runtime=apptainer",
        'launch.container_options=["--nv"]',
        "launch.python=/opt/python",
    )
    log = tmp_path / "%j.log"
    script = sbatch_script.render(launch, name="exp", log=log, frozen=[tmp_path / "s 1.json"])
    head = script.partition("# From here on")[0].splitlines()
    assert head == [
        "#!/bin/bash",
        "#SBATCH --job-name=exp",
        f"#SBATCH --output={log}",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --qos=high",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=7",
        "#SBATCH --time=24:00:00",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --constraint=a100",
        "",
        "module load cuda/12.4 gcc",
        "ulimit -n 65536",
        "export EVERSTEP_PYTHON=/opt/python",
        f"export EVERSTEP_STATUS_DIR={tmp_path}",
        "export EVERSTEP_STARTED_BY=srun",
        "srun_options=()",
        "within=(apptainer exec --nv '/images/a b.sif')",
        f"set -- '--frozen={tmp_path}/s 1.json'",
        "",
    ]
    assert "scontrol requeue" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_script_of_an_array(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.json" for n in range(3)]
    launch = slurm("launch.array_limit=2", "launch.container=img", "launch.setup=[x]")
    script = sbatch_script.render(launch, name="exp", log=tmp_path / "%A_%a.log", frozen=files)
    assert "#SBATCH --array=0-2%2\n" in script
    assert "srun_options=(--container-image=img)\n" in script
    tasks = " ".join(f"--frozen={path}" for path in files)
    assert f'tasks=({tasks})\nset -- "${{tasks[SLURM_ARRAY_TASK_ID]}}"\n' in script


def test_the_lead_time_must_suffice_for_a_step_and_a_save_as_they_were(tmp_path: Path) -> None:
    settings = compose("experiment=tiny", f"run.dir={tmp_path}")
    launch = slurm("launch.container=img")
    assert "is not known yet" in launch_slurm.check(settings, launch)[1]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 30.0}\n{"step')
    (tmp_path / "events.jsonl").write_text('{"event": "committed", "seconds": 80.0}\n')
    assert "the lead time suffices" in launch_slurm.check(settings, launch)[1]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "committed", "seconds": 95.0}\n')
    with pytest.raises(ConfigError, match=r"up to 30 s and a save up to 95 s\. Set it to 251"):
        launch_slurm.check(settings, launch)


def test_what_the_ranks_would_refuse_is_refused_before_it_is_submitted(tmp_path: Path) -> None:
    two = slurm("launch.ranks_per_node=2")
    typo = "++deepspeed.zero_optimization.reduce_bucket_sizes=1"
    settings = compose("experiment=tiny", f"run.dir={tmp_path}", typo)
    with pytest.raises(ConfigError, match="reduce_bucket_sizes"):
        launch_slurm.check(settings, two)
    settings = compose("experiment=tiny", f"run.dir={tmp_path}", "++model.layerz=1")
    with pytest.raises(ConfigError, match="layerz"):
        launch_slurm.check(settings, two)
    settings = compose("experiment=tiny", f"run.dir={tmp_path}")
    assert len(launch_slurm.check(settings, two)) == 2


def test_settings_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    settings = compose("experiment=tiny", "optimizer.lr=0.1", "+optimizer.params.a=3e-5")
    frozen.freeze(settings, ["optimizer.lr=0.1"], tmp_path / "settings.json")
    thawed, arguments = frozen.thaw(tmp_path / "settings.json")
    assert thawed == settings
    assert arguments == ["optimizer.lr=0.1"]
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the settings of a submitted job"):
        frozen.thaw(tmp_path / "settings.json")
    with pytest.raises(ConfigError, match="cannot be overridden by seed=1"):
        overrides.parse([f"--frozen={tmp_path}", "seed=1"])


def test_one_argument_holds_all_others() -> None:
    words = ["a=${b}", 'c={"d": [1, 2]}', "e='f g'", "h=`i`$(j);\n\\"]
    (word,) = [overrides.encode(words, {"EVERSTEP_LINK": "/x y"})]
    assert word.replace("--encoded=", "").translate({ord(c): None for c in "-_="}).isalnum()
    command = overrides.parse(["--local_rank=1", word])
    assert command == overrides.Command(words, 1, {"EVERSTEP_LINK": "/x y"})
    with pytest.raises(ConfigError, match="is not what launch=deepspeed sent"):
        overrides.parse([word[:-7]])


def test_which_slots_of_a_hostfile_are_used(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nh1 slots=2\nh2 slots=4  # new\nh3 slots=1\n")
    assert hosts.read(over_ssh(path)) == {"h1": [0, 1], "h2": [0, 1, 2, 3], "h3": [0]}
    assert list(hosts.read(over_ssh(path, "launch.nodes=2"))) == ["h1", "h2"]
    chosen = hosts.read(over_ssh(path, 'launch.include="h2:0,3@h1"'))
    assert chosen == {"h1": [0, 1], "h2": [0, 3]}
    assert hosts.read(over_ssh(path, 'launch.exclude="h2@h3@h1:1"')) == {"h1": [0]}


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("h1\n", [], "line 1: found 'h1'"),
        ("h1 slots=1\nh1 slots=2\n", [], "line 2"),
        ("", [], "no slot is left"),
        ("h1 slots=1\n", ["launch.nodes=2"], "has only 1 hosts"),
        ("h1 slots=1\n", ["launch.include=h2"], "'h2' is not a host"),
        ("h1 slots=1\n", ['launch.exclude="h1:1"'], "'h1:1' is not a host"),
        ("h1 slots=1\n", ["launch.exclude=h1"], "no slot is left"),
    ],
)
def test_a_hostfile_that_cannot_be_used(
    text: str, words: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=message):
        hosts.read(over_ssh(tmp_path / "hosts", *words))


def test_ranks_per_node_of_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*words: str, **environ: str) -> tuple[int, int]:
        launch = compose("launch=srun", *words).launch
        assert isinstance(launch, SrunLaunch)
        return launch_srun.ranks_per_node(launch, environ)

    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}
    assert of(**inside, SLURM_NTASKS="8") == (4, 2)
    assert of(**inside, SLURM_GPUS_ON_NODE="8") == (4, 8)
    assert of("launch.nodes=2", "launch.ranks_per_node=3", **inside) == (2, 3)
    with pytest.raises(ConfigError, match="give launch"):
        of(**inside)
    with pytest.raises(ConfigError, match="has only 4 nodes"):
        of("launch.nodes=5", **inside)
    with pytest.raises(ConfigError, match="inside a Slurm allocation only"):
        of()


def test_names_and_directories_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*words: str) -> list[Settings]:
        return [s for s, _ in sweep.plan(words, lambda w: train.compose(w, {}))]

    names = [s.run.name for s in plan("run.name=a", "optimizer.lr=1e-4,3e-4", "seed=1,2")]
    assert names == [
        "a_optimizer.lr-0.0001-seed-1",
        "a_optimizer.lr-0.0001-seed-2",
        "a_optimizer.lr-0.0003-seed-1",
        "a_optimizer.lr-0.0003-seed-2",
    ]
    assert [s.run.name for s in plan("run.name=a,b")] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"optimizer\.lr=-1"):
        plan("optimizer.lr=1,-1")
    long = sweep.name_of("a", [f"x={'y' * 300}"], ["x"])
    assert len(long) < 150
    assert long != sweep.name_of("a", [f"x={'y' * 301}"], ["x"])


def test_what_a_starter_and_rank_0_tell_each_other(tmp_path: Path) -> None:
    now = [0.0]

    def look() -> str | None:
        now[0] += 2
        return side.look()

    with StarterSide(tmp_path, "one") as link:
        side = RankSide(link.path, clock=lambda: now[0])
        assert look() is None
        now[0] += LOST_SECONDS - 5
        link.beat()
        assert look() is None
        now[0] += LOST_SECONDS - 5
        assert look() is None
        now[0] += 10
        assert look() == "the starter is gone"
        link.ask_to_stop("SIGTERM")
        assert look() == "SIGTERM"
        assert link.status() == ""
        for rank, time in ((1, 2.0), (0, 3.0)):
            path = link.path / f"rank_{rank:05d}.json"
            path.write_text(json.dumps({"time": time, "text": f"of {rank}"}))
        assert link.failures() == [(0, "of 0"), (1, "of 1")], "the first failure last"
    assert not link.path.exists()
