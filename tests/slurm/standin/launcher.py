"""A stand-in for the launcher, to test the batch script: a rank that lives and dies as told.

Arguments are behaviours, one for each start of the job; the last one stands for all further starts:

    N         start, then end with verdict N
    stop      start, wait for SIGUSR2 or SIGTERM, take a while to save, end with verdict 75
    deaf      start, take no notice of SIGUSR2, die of SIGTERM without a verdict
    killed    start; rank 1 is then killed by SIGKILL
    loading   wait for SIGTERM without ever having started, and die of it

"TASK:BEHAVIOUR" is for that task of an array only.

Every rank appends what it did and which signals it got to ``events.JOB.RANK`` in the working
directory. Rank 0 keeps the launcher's side of the contract about the status file, and all ranks
leave together.
"""

import os
import signal
import sys
import time
from pathlib import Path

JOB, RANK, RANKS = (
    os.environ["SLURM_JOB_ID"],
    int(os.environ["SLURM_PROCID"]),
    int(os.environ["SLURM_STEP_NUM_TASKS"]),
)
SAVE_SECONDS = 0.7  # srun kills the ranks 60 ms after a SIGTERM to itself: this would tell
RESTART = int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def main() -> None:
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    behaviours = [
        word.removeprefix(f"{task}:")
        for word in sys.argv[1:]
        if ":" not in word or word.startswith(f"{task}:")
    ]
    behaviour = behaviours[min(RESTART, len(behaviours) - 1)]
    # Blocked here and, for USR2, by the batch script before: what came early is still delivered.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    record(f"behaves:{behaviour}")
    if behaviour == "loading":
        die_of_term()
    set_status("started")
    record("started")
    if behaviour == "deaf":
        die_of_term()
    meet("started")
    if behaviour == "killed":
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        die_of_term()
    if behaviour == "stop":
        got = signal.sigwait({signal.SIGTERM, signal.SIGUSR2})
        record(got.name)
        time.sleep(SAVE_SECONDS)
    verdict = 75 if behaviour == "stop" else int(behaviour)
    set_status(str(verdict))
    meet("done")
    os._exit(verdict)  # no finalizing that a late SIGTERM could turn into 143


def die_of_term() -> None:
    signal.sigwait({signal.SIGTERM})
    record("SIGTERM")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


def record(event: str) -> None:
    with Path(f"events.{JOB}.{RANK}").open("a") as file:
        file.write(f"{RESTART} {event}\n")


def set_status(word: str) -> None:
    if RANK == 0:
        path = Path(os.environ["EVERSTEP_STATUS_FILE"])
        draft = path.with_suffix(".new")
        draft.write_text(f"{word}\n")
        draft.rename(path)


def meet(place: str) -> None:
    Path(f"{place}.{JOB}.{RESTART}.{RANK}").touch()
    while not all(Path(f"{place}.{JOB}.{RESTART}.{rank}").exists() for rank in range(RANKS)):
        time.sleep(0.02)


main()
