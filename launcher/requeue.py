"""Attempts and verdicts: what a batch script or a scheduler may do after this process.

Owns the exit codes, the status file through which rank 0 tells its verdict (srun's own exit code
cannot carry one), and attempts.jsonl, which only rank 0 writes: `bring_up` when an attempt begins,
`start` once it knows its step, `end` when it ends by itself. A killed attempt has no `end`.

The status file named by EVERSTEP_STATUS_FILE holds the word `started` from bring-up on, and at the
end the verdict as a decimal number, if there is one: a crash leaves `started`.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.protocol.layout import CheckpointDirectory
from launcher import versions
from launcher.errors import ConfigError, NoProgressError
from launcher.rank import RankProcess
from launcher.run_directory import RECORDS_VERSION, JsonLines, now
from launcher.seeing.lines import Lines, Record
from launcher.seeing.records import is_of_an_attempt

DONE = 0
FAILED = 1
NO_PROGRESS = 70  # or stopped by a guard: in both cases a person is needed
SAVED = 75
BAD_CONFIG = 78

VERDICTS = (BAD_CONFIG, NO_PROGRESS, SAVED, DONE)
"""What all ranks agreed on, the gravest first; any other code is a failure."""

STARTED = "started"
STATUS_FILE = "EVERSTEP_STATUS_FILE"


def write_status(environ: Mapping[str, str], text: str) -> None:
    """Replace the status file's content in one step, if the environment names a status file."""
    name = environ.get(STATUS_FILE)
    if not name:
        return
    path = Path(name)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def attempts_without_progress(records: Sequence[Mapping[str, Any]], from_step: int) -> int:
    """Count the newest attempts that began at `from_step`, or died before, and came to nothing.

    An attempt that was asked to stop and saved, or that completed, ends the count, and so does
    one that began elsewhere: between it and now there was progress.
    """
    attempts: dict[str, dict[str, Record]] = {}
    for record in records:
        attempts.setdefault(record["start_id"], {})[record["event"]] = record
    count = 0
    for attempt in reversed(attempts.values()):
        start, end = attempt.get("start"), attempt.get("end")
        if end is not None and end.get("exit_code") in (DONE, SAVED, BAD_CONFIG, NO_PROGRESS):
            if end["exit_code"] in (BAD_CONFIG, NO_PROGRESS):
                continue  # refused at start: it says nothing about the run
            break
        if start is not None and start.get("from_step") != from_step:
            break
        count += 1
    return count


def check_progress(records: Sequence[Mapping[str, Any]], from_step: int, limit: int) -> None:
    """Refuse to start where the last `limit` attempts all ended without a new checkpoint.

    Raises:
        NoProgressError: says how many, from which step, and what to do.
    """
    count = attempts_without_progress(records, from_step)
    if count >= limit:
        raise NoProgressError(
            f"the last {count} attempts all began at step {from_step} and ended without a newer "
            "checkpoint, so this one would too.\n"
            "  Read the newest logs/attempt_*/ of the run, and after the cause is mended start "
            f"once with launch.max_attempts_without_progress={count + 1}."
        )


class AttemptLog:
    """This attempt's lines in attempts.jsonl; on ranks other than 0 every method does nothing.

    The attempt's number is known only once the run is held, so a start id links the lines.
    """

    def __init__(self, lines: JsonLines, process: RankProcess) -> None:
        self._lines = lines if process.topology.rank == 0 else None
        self._process = process
        self._overrides: Sequence[str] = ()
        self._start_id = secrets.token_hex(4)
        self._began = time.monotonic()
        self._attempt: int | None = None
        self._from_step: int | None = None
        self.step: int | None = None
        """The newest finished step, known from `start` on."""

    @property
    def seconds(self) -> float:
        """How long the attempt has lasted."""
        return time.monotonic() - self._began

    def bring_up(self, overrides: Sequence[str]) -> None:
        """Say that an attempt begins, before anything that could kill it."""
        self._overrides = overrides
        topology, environ = self._process.topology, self._process.environ
        self._write(
            "bring_up",
            host=socket.gethostname(),
            pid=os.getpid(),
            started_by=topology.started_by,
            world_size=topology.world_size,
            nodes=topology.world_size // topology.local_world_size,
            slurm_job=environ.get("SLURM_JOB_ID"),
            slurm_restart_count=environ.get("SLURM_RESTART_COUNT"),
            launch=environ.get("EVERSTEP_LAUNCH_ID"),
            overrides=list(overrides),
            versions=versions.installed(),
            records_version=RECORDS_VERSION,
        )

    def start(self, attempt: int, from_step: int, changed: Sequence[str] = ()) -> None:
        """Say which attempt this is, where it goes on, and which settings have changed."""
        self._attempt, self._from_step, self.step = attempt, from_step, from_step
        self._write("start", attempt=attempt, from_step=from_step, changed=list(changed))

    def end(self, exit_code: int, *, cause: str) -> None:
        """Say how it ended. A killed attempt cannot."""
        self._write(
            "end",
            attempt=self._attempt,
            from_step=self._from_step,
            step=self.step,
            exit_code=exit_code,
            cause=cause,
            seconds=round(self.seconds, 3),
        )

    def go_back(self, cause: str) -> None:
        """End this attempt as one to be gone on from, and begin the next in the same process."""
        self.end(SAVED, cause=cause)
        self._start_id, self._began = secrets.token_hex(4), time.monotonic()
        self._attempt = self._from_step = self.step = None
        self.bring_up(self._overrides)

    def resume_mode(self, wanted: str) -> str:
        """Return `auto` where an attempt of the same launch has begun, and else what is wanted.

        A run that was told to start anew, or from a tag, and is then started again by whoever
        restarts or requeues it, is to go on from where it was.
        """
        launch = self._process.environ.get("EVERSTEP_LAUNCH_ID")
        records = self.earlier()
        ours = {r["start_id"] for r in records if launch and r.get("launch") == launch}
        begun = any(r["event"] == "start" and r["start_id"] in ours for r in records)
        return "auto" if begun and wanted != "must" else wanted

    def refuse_lost_checkpoints(self, wanted: str, directory: CheckpointDirectory) -> None:
        """Refuse a start that would begin anew because `directory` is not where it has saved.

        Every attempt that has begun leaves its number there, saved or not.

        Args:
            wanted: the setting `resume`.

        Raises:
            ConfigError: what may be wrong, and how to begin anew all the same.
        """
        if self.resume_mode(wanted) != "auto" or os.path.isdir(directory.attempts):
            return
        begun = [r for r in self.earlier() if r["event"] == "start"]
        if begun:
            raise ConfigError(
                f"checkpoint.dir={directory.root} holds no attempt, but this run has made "
                f"{len(begun)} before, so it would begin anew at step 0.\n"
                "  Is its disk mounted, and checkpoint.dir what it was? To begin anew all the "
                "same: resume=never."
            )

    def earlier(self) -> list[Record]:
        """Return the records of the attempts before this one; what is damaged is passed over.

        Raises:
            OSError: they cannot be read; that there are none is no error.
        """
        if self._lines is None:
            return []
        lines = Lines(self._lines.path)
        found = [
            record
            for record in lines
            if is_of_an_attempt(record) and record["start_id"] != self._start_id
        ]
        if lines.error is not None and not isinstance(lines.error, FileNotFoundError):
            raise lines.error
        return found

    def _write(self, event: str, **fields: Any) -> None:
        if self._lines is not None:
            start = {"event": event, "start_id": self._start_id, "time": now()}
            self._lines.append({**start, **fields})
