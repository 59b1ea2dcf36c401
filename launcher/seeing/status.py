"""`everstep status [DIR] [--json]`: one screen about a run, or a line for each run of a directory.

Works while the run lives, from any machine that sees its directory, and without torch. Exit codes:
0 a run was shown, 2 there is none.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engine import describe
from engine.describe import duration_text
from launcher.seeing.lines import text
from launcher.seeing.records import NoRunError, runs_in
from launcher.seeing.summary import Summary, loss_text, summarize
from launcher.seeing.timeline import Attempt

EXIT_USAGE = 2

_EXIT_WORDS = {0: "done", 70: "needs a person", 75: "stopped", 78: "refused"}


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="everstep status", description="Show how a run stands, or every run of a directory."
    )
    parser.add_argument("dir", nargs="?", default="runs", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        paths = runs_in(options.dir)
    except NoRunError as error:
        print(f"everstep: {error}", file=sys.stderr)
        return EXIT_USAGE
    runs = map(summarize, paths)  # one after the other: of a long run a summary has megabytes
    if options.json:
        print(json.dumps([as_json(run) for run in runs], indent=2))
    else:
        print("\n".join(screen(next(runs)) if len(paths) == 1 else table(runs)))
    return 0


def screen(run: Summary) -> list[str]:
    """Return the lines about one run."""
    return [
        f"run {run.name}: {state_of(run)}",
        *_progress(run),
        *_goodput(run),
        *_alarms(run),
        "",
        *_attempts(run),
        "",
        *_checkpoints(run),
        *(f"note: {note}" for note in run.notes),
    ]


def table(runs: Iterable[Summary]) -> list[str]:
    """Return a line for each run, headings first."""
    rows = [("RUN", "STEP", "OF", "LOSS", "GOODPUT", "ATTEMPTS", "COMMITTED", "STATE")]
    for run in runs:
        rows.append(
            (
                run.name,
                str(run.step),
                "?" if run.total_steps is None else str(run.total_steps),
                "-" if run.newest is None else loss_text(run.newest.loss),
                f"{run.goodput.share:.0%}",
                str(len(run.attempts)),
                _newest_checkpoint(run),
                state_of(run),
            )
        )
    return describe.aligned(rows, right=("STEP", "OF", "LOSS", "GOODPUT", "ATTEMPTS"))


def as_json(run: Summary) -> dict[str, Any]:
    """Return what a program may want to know of a run; times are seconds since the epoch.

    A loss that is not finite is null: JSON has no word for it.
    """
    loss = None if run.newest is None or not math.isfinite(run.newest.loss) else run.newest.loss
    return {
        "run": run.name,
        "path": str(run.path.absolute()),
        "state": "complete" if run.is_complete else run.life.state,
        "step": run.step,
        "total_steps": run.total_steps,
        "loss": loss,
        "attempts": [
            {
                "attempt": attempt.number,
                "began": attempt.span[0] if attempt.span else None,
                "last_seen": attempt.span[1] if attempt.span else None,
                "from_step": attempt.from_step,
                "last_step": attempt.last_step,
                "exit_code": attempt.exit_code,
                "cause": attempt.cause,
            }
            for attempt in run.attempts
        ],
        "checkpoints": [
            {
                "tag": one.name,
                "state": one.state,
                "step": one.manifest.step if one.manifest else None,
                "bytes": describe.total_bytes(one.manifest) if one.manifest else None,
                "staged_at": one.manifest.staged_at if one.manifest else None,
                "error": one.error,
            }
            for one in run.checkpoints
        ],
        "in_flight": [vars(save) for save in run.life.in_flight],
        "goodput": {"share": run.goodput.share, "seconds": run.goodput.by_cause()},
        "alarms": alarms_of(run),
        "steps": {"kept": run.goodput.kept_steps, "lost": run.goodput.lost_steps},
        "notes": list(run.notes),
    }


def state_of(run: Summary) -> str:
    """Return in words how a run stands."""
    return "complete" if run.is_complete else run.life.words


def _progress(run: Summary) -> list[str]:
    of = "" if run.total_steps is None else f" of {run.total_steps:,}"
    parts = [f"step {run.step:,}{of}"]
    if run.newest is not None:
        parts.append(f"loss {loss_text(run.newest.loss)}")
        seconds = statistics.median(step.seconds for step in run.recent)
        parts.append(f"{seconds:.3g} s/step")
        if run.is_alive and run.total_steps is not None and run.total_steps > run.step:
            parts.append(
                f"{duration_text((run.total_steps - run.step) * seconds)} left at that pace"
            )
    return ["  ".join(parts)]


def _goodput(run: Summary) -> list[str]:
    found = run.goodput
    if not found.wall:
        return []
    others = [
        f"{name} {seconds / found.wall:.1%}"
        for name, seconds in sorted(found.by_cause().items(), key=lambda item: -item[1])
        if name != "kept" and seconds / found.wall >= 0.0005
    ]
    lost = f"; {describe.counted(found.lost_steps, 'step')} lost" if found.lost_steps else ""
    return [
        f"goodput {found.share:.1%} of {duration_text(found.wall)}"
        + (f"  ({', '.join(others)})" if others else "")
        + lost
    ]


def _alarms(run: Summary) -> list[str]:
    steps = alarms_of(run)
    if not steps:
        return []
    of = f"the newest of step {steps[-1]}" if len(steps) > 1 else f"of step {steps[0]}"
    return [f"{describe.counted(len(steps), 'alarm')} of the guards, {of}: events.jsonl says what"]


def alarms_of(run: Summary) -> list[int]:
    """Return the steps that the guards have told alarms of, in the order that they were told."""
    return [
        int(step)
        for attempt in run.attempts
        for step in attempt.written.events_of("alarm").step
        if math.isfinite(step)
    ]


def _attempts(run: Summary) -> list[str]:
    rows = [("ATTEMPT", "BEGAN", "FOR", "FROM", "TO", "RANKS", "STARTED BY", "ENDED")]
    for attempt in run.attempts:
        rows.append(
            (
                "-" if attempt.number is None else str(attempt.number),
                began_of(attempt),
                duration_text(attempt.span[1] - attempt.span[0]) if attempt.span else "?",
                "-" if attempt.from_step is None else str(attempt.from_step),
                "-" if attempt.last_step is None else str(attempt.last_step),
                attempt.detail("world_size"),
                attempt.detail("started_by"),
                "not yet" if run.lives(attempt) else ending_of(attempt),
            )
        )
    return describe.aligned(rows, right=("ATTEMPT", "FROM", "TO", "RANKS"))


def began_of(attempt: Attempt) -> str:
    """Return when an attempt began, in the time of this machine."""
    if attempt.span is None:
        return "?"
    return datetime.datetime.fromtimestamp(attempt.span[0]).strftime("%Y-%m-%d %H:%M:%S")


def ending_of(attempt: Attempt) -> str:
    """Return in words how an attempt that does not run any more has ended."""
    if attempt.exit_code is None:
        return "killed, or its host was lost"
    word = _EXIT_WORDS.get(attempt.exit_code, f"failed ({attempt.exit_code})")
    return word if attempt.cause in (None, word) else f"{word}: {attempt.cause}"


def _checkpoints(run: Summary) -> list[str]:
    now = datetime.datetime.fromtimestamp(run.now, datetime.timezone.utc)
    lines = ["no checkpoint is committed"]
    if run.checkpoints:
        lines = describe.table(run.checkpoints, now)
    for save in run.life.in_flight:
        lines.append(f"{save.tag} is {save.words(run.expected_bytes)}")
    lines += [f"note: {text(one.error)}" for one in run.checkpoints if one.error]
    return lines


def _newest_checkpoint(run: Summary) -> str:
    for one in reversed(run.checkpoints):
        if one.manifest is not None:
            staged = datetime.datetime.fromisoformat(one.manifest.staged_at).timestamp()
            return f"step {one.manifest.step}, {duration_text(run.now - staged)} ago"
    return "none"
