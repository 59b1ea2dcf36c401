"""One run, ended again and again in every way there is: is it the run that nothing disturbed?

    python -m tests.endurance --attempts 25 [--seed N] [--change-ranks]

Each attempt is started by the same command and ended in a way and at a moment that the seed draws:
a signal to the starter, SIGKILL of a trainer, of all, of a writer or of the starter, a STOP file, a
SAVE file. At the end the losses are compared bit by bit with those of a run that was left alone,
and every step must have taken the samples that follow those of the step before. With
--change-ranks the number of ranks is drawn for each attempt, too: then the bits are not compared.

Not part of pytest: `make endure` runs it, for as many attempts as you like.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests import daemons, run_processes, tiny_run
from tests.slurm.cluster_job import wait_for

STEPS_PER_ATTEMPT = 12  # more than an attempt makes before it is ended
GLOBAL_BATCH_SIZE = 8  # of the tiny experiment
SECONDS = 600


class Attempt:
    """One start of the run, under way."""

    def __init__(self, run: Path, steps: int, ranks: int) -> None:
        self.run = run
        self._lines_before = len(metrics(run))
        self._log = run.with_suffix(".log").open("a")
        self.process = subprocess.Popen(
            command(run, steps, ranks),
            env=os.environ | tiny_run.environment() | {run_processes.MARK: str(run)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_for_steps(self, count: int) -> bool:
        """Wait until it has written so many steps; False if it ended before."""
        wait_for(
            lambda: self.process.poll() is not None or self.written() >= count,
            SECONDS,
            f"writes {count} steps",
        )
        return self.process.poll() is None

    def wait(self) -> int:
        """Wait until every process of the run has ended; return the starter's code."""
        code = self.process.wait(SECONDS)
        wait_for(lambda: not daemons.marked(run_processes.MARK, self.run), SECONDS, "all end")
        self._log.close()
        return code

    def written(self) -> int:
        """Steps that this attempt has written, so far."""
        return len(metrics(self.run)) - self._lines_before


def command(run: Path, steps: int, ranks: int) -> list[str]:
    """The command line of every attempt."""
    return [
        *(sys.executable, "-m", "launcher", "experiment=tiny", f"run.dir={run}"),
        *(f"train.steps={steps}", f"launch.ranks={ranks}", "batch.micro_size=1"),
        *("launch.max_attempts_without_progress=1000", "launch.grace_seconds=5"),
    ]


def metrics(run: Path) -> list[dict[str, float]]:
    """The complete lines of metrics.jsonl, so far."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def signal_starter(number: signal.Signals) -> Callable[[Attempt, random.Random], None]:
    return lambda attempt, _: attempt.process.send_signal(number)


def kill_one_trainer(attempt: Attempt, draw: random.Random) -> None:
    if pids := run_processes.trainers(attempt.run):
        kill(draw.choice(pids))


def kill_all_trainers(attempt: Attempt, draw: random.Random) -> None:
    for pid in run_processes.trainers(attempt.run):
        kill(pid)


def kill_a_writer_and_stop(attempt: Attempt, draw: random.Random) -> None:
    if pids := run_processes.writers(attempt.run):
        kill(draw.choice(pids))
    attempt.wait_for_steps(attempt.written() + 1)
    attempt.process.terminate()


def touch_stop(attempt: Attempt, draw: random.Random) -> None:
    (attempt.run / "STOP").touch()


def touch_save_and_kill(attempt: Attempt, draw: random.Random) -> None:
    (attempt.run / "SAVE").touch()
    attempt.wait_for_steps(attempt.written() + 3)
    kill_all_trainers(attempt, draw)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself a moment ago


WAYS: dict[str, Callable[[Attempt, random.Random], None]] = {
    "SIGTERM to the starter": signal_starter(signal.SIGTERM),
    "SIGUSR2 to the starter": signal_starter(signal.SIGUSR2),
    "SIGKILL of the starter": signal_starter(signal.SIGKILL),
    "SIGKILL of a trainer": kill_one_trainer,
    "SIGKILL of all trainers": kill_all_trainers,
    "SIGKILL of a writer, then SIGTERM": kill_a_writer_and_stop,
    "a STOP file": touch_stop,
    "a SAVE file, then SIGKILL of all trainers": touch_save_and_kill,
}


def endure(run: Path, attempts: int, draw: random.Random, *, change_ranks: bool) -> Counter[str]:
    """Take the run to its end through so many attempts; return how often each way was taken."""
    steps = attempts * STEPS_PER_ATTEMPT
    taken: Counter[str] = Counter()
    ways = list(WAYS)
    for number in range(attempts):
        way = ways[number] if number < len(ways) else draw.choice(ways)  # each at least once
        ranks = draw.choice((1, 2, 4)) if change_ranks else 2
        after, early = draw.randint(1, 6), draw.random() < 0.1
        attempt = Attempt(run, steps, ranks)
        began = time.monotonic()
        if not (early and "file" not in way and "writer" not in way):
            assert attempt.wait_for_steps(after), "the run ended by itself"
        else:
            wait_for(lambda: run_processes.trainers(run), SECONDS, "the trainers start")
            after = 0
        WAYS[way](attempt, draw)
        code = attempt.wait()
        taken[way] += 1
        print(
            f"attempt {number:3}  {ranks} ranks  after {after} steps: {way:42}  exit code {code:4}"
            f"  step {tiny_run.steps_done(run):4}  {time.monotonic() - began:5.1f} s",
            flush=True,
        )
    last = Attempt(run, steps, 2)
    code = last.wait()
    assert code == 0, f"exit code {code}; see {run.with_suffix('.log')}"
    return taken


def check_samples(run: Path, steps: int) -> None:
    """Every step's last word stands at the offset that follows from the step before."""
    offsets = {line["step"]: line["sample_offset"] for line in metrics(run)}
    assert offsets == {step: step * GLOBAL_BATCH_SIZE for step in range(1, steps + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__)
    parser.add_argument("--attempts", type=int, default=25)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--change-ranks", action="store_true")
    arguments = parser.parse_args()
    steps = arguments.attempts * STEPS_PER_ATTEMPT
    print(f"seed {arguments.seed}, {arguments.attempts} attempts, {steps} steps", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="endurance-"))
    run, reference = directory / "run", directory / "reference"
    taken = endure(
        run,
        arguments.attempts,
        random.Random(arguments.seed),
        change_ranks=arguments.change_ranks,
    )
    check_samples(run, steps)
    if not arguments.change_ranks:
        assert Attempt(reference, steps, 2).wait() == 0, f"see {reference.with_suffix('.log')}"
        assert tiny_run.losses(run) == tiny_run.losses(reference), f"losses differ: {directory}"
    for way, count in sorted(taken.items()):
        print(f"{count:4}  {way}")
    what = "samples" if arguments.change_ranks else "samples and every bit of the loss"
    print(f"{steps} steps in {arguments.attempts + 1} attempts: {what} as undisturbed")


if __name__ == "__main__":
    main()
