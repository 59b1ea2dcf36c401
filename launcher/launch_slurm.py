"""`launch=slurm`: check a run, or all runs of a sweep, and submit them as one batch job.

What would be refused after hours in the queue is refused here: this process imports the model, the
data and DeepSpeed, as a rank would (unless the ranks run in a container, where they may be others).
The settings are frozen into the run directory and the job reads them there, so whatever happens to
`conf/` meanwhile, every start of the job is the same run.
"""

import contextlib
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import frozen, requeue, sbatch_script
from launcher.config import Settings
from launcher.errors import ConfigError, LauncherError
from launcher.launch_settings import SlurmLaunch
from launcher.seeing.lines import Lines, number

_SUBMITTED = "submitted"

Job = tuple[Settings, Sequence[str]]


class SubmitError(LauncherError):
    """Slurm did not take the job."""


def run(jobs: Sequence[Job], launch: SlurmLaunch, environ: Mapping[str, str]) -> int:
    """Check and submit; return the exit code. With `launch.dry_run` print the script instead.

    Args:
        jobs: settings and arguments of each run; more than one are the tasks of an array. They have
            passed `launcher.start.check`.

    Raises:
        ConfigError: what the ranks would refuse, or a lead time that is too short.
        SubmitError: sbatch failed.
    """
    for settings, _ in jobs:
        for line in check(settings, launch):
            print(f"everstep: {line}", file=sys.stderr)
    first = jobs[0][0]
    directories = [_next_directory(Path(settings.run.dir)) for settings, _ in jobs]
    script = sbatch_script.render(
        launch,
        name=first.run.name,
        log=directories[0] / ("%A_%a.log" if len(jobs) > 1 else "%j.log"),
        frozen=[directory / "settings.json" for directory in directories],
    )
    if launch.dry_run:
        print(script, end="")
        return requeue.DONE
    for (settings, arguments), directory in zip(jobs, directories, strict=True):
        directory.mkdir(parents=True)
        frozen.freeze(settings, arguments, directory / "settings.json")
    path = directories[0] / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    job = _submit(path, environ)
    what = f"{len(jobs)} runs as the array {job}" if len(jobs) > 1 else f"job {job}"
    print(f"submitted {what}: {launch.nodes} nodes x {launch.ranks_per_node} ranks, {path}")
    return requeue.DONE


def check(settings: Settings, launch: SlurmLaunch) -> list[str]:
    """Check what a rank would; return what could not be checked and what was found, as sentences.

    Raises:
        ConfigError: the ranks would refuse it, or the lead time is too short.
    """
    said = [_space(Path(settings.checkpoint.dir)), _lead_time(Path(settings.run.dir), launch)]
    if launch.container is not None:
        return [*said, "model, data and DeepSpeed's settings are checked in the container only."]
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs there; ours is for the script
        from launcher import builders

        builders.deepspeed_config(settings, launch.ranks)
        builders.check_model(settings)
        builders.build_stream(settings)
    return said


def _space(directory: Path) -> str:
    """Say how much is free where checkpoints go; refuse what is less than two of the newest."""
    place = next((p for p in (directory, *directory.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    tags = sorted(directory.glob("global_step*"), key=lambda tag: tag.stat().st_mtime)
    if not tags:
        return f"{free / 1e9:.1f} GB are free for checkpoints at {place}."
    size = sum(path.stat().st_size for path in tags[-1].iterdir())
    if free < 2 * size:
        raise ConfigError(
            f"checkpoint.dir={directory}: {free} bytes are free, and two checkpoints like "
            f"{tags[-1].name} take {2 * size}. Make room, or set checkpoint.dir elsewhere."
        )
    return f"{free / 1e9:.1f} GB are free for checkpoints of {size / 1e9:.1f} GB."


def _lead_time(run_directory: Path, launch: SlurmLaunch) -> str:
    """Compare the signal's lead time with a save and a step of earlier attempts."""
    step = _longest(run_directory / "metrics.jsonl", "step_seconds", {})
    save = _longest(run_directory / "events.jsonl", "seconds", {"event": "committed"})
    if step is None or save is None:
        return (
            "how long a step and a save take is not known yet: see that "
            f"launch.signal_lead_seconds={launch.signal_lead_seconds} is more than both together."
        )
    if step + save >= launch.signal_lead_seconds:
        raise ConfigError(
            f"launch.signal_lead_seconds={launch.signal_lead_seconds} is too short: in this run a "
            f"step took up to {step:.0f} s and a save up to {save:.0f} s. Set it to "
            f"{int(2 * (step + save)) + 1} or more."
        )
    return f"a step took up to {step:.1f} s and a save {save:.1f} s: the lead time suffices."


def _longest(path: Path, key: str, wanted: Mapping[str, Any]) -> float | None:
    """Return the largest value in a file of JSON lines, of those records that are wanted."""
    values = (number(one.get(key)) for one in Lines(path) if wanted.items() <= one.items())
    return max((value for value in values if not math.isnan(value)), default=None)


def _next_directory(run_directory: Path) -> Path:
    parent = run_directory / _SUBMITTED
    number = 1 + max((int(p.name) for p in parent.glob("[0-9]*")), default=-1)
    return parent / f"{number:04d}"


def _submit(script: Path, environ: Mapping[str, str]) -> str:
    command = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise SubmitError(
            "there is no sbatch here: launch=slurm is given where jobs are submitted. "
            "launch.dry_run=true shows the job all the same."
        ) from error
    if done.returncode != 0:
        raise SubmitError(f"sbatch refused the job:\n{done.stderr.strip()}\n  It is {script}.")
    return done.stdout.strip().partition(";")[0]
