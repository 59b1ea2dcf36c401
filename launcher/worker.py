"""One rank's process, from its settings to its exit code.

Every failure that all ranks share ends on all of them with one message, from rank 0, and an exit
code that says whether starting again can help (`launcher.requeue`). Any other exception is one
rank's own: it shows its traceback and ends the process at once, because the others may wait in a
collective that will never complete, and the starter learns of it only by seeing a process end.

Runs in the trainer's main thread, with the stop signals already taken over. What happens between
the first meeting of the ranks and their parting is in `launcher.session`.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from engine.byte_bar import moves_cursor
from launcher import keeper, meeting, requeue, starter_link, versions
from launcher.config import Settings
from launcher.errors import ConfigError, LauncherError, NoProgressError
from launcher.monitors.thread import any_left_behind
from launcher.rank import RankProcess
from launcher.run_directory import RunDirectory
from launcher.topology import Topology

_KEEPER_MARGIN_SECONDS = 60.0


def run(composed: Settings | ConfigError, overrides: Sequence[str], process: RankProcess) -> int:
    """Live this rank's life and return its exit code.

    Args:
        composed: this rank's settings, or why its command line has none; the ranks compare them.
        overrides: what the user gave, for the record of attempts.
    """
    link = starter_link.take_over(process.environ, process.topology.rank)
    place = None
    if isinstance(composed, Settings):
        place = meeting.place_of(process.environ, Path(composed.run.dir))
    prepare_environment(process.environ, process.topology)
    try:
        code = _live(composed, overrides, process, place, link)
    except ConfigError as error:
        _refuse(process, error, requeue.BAD_CONFIG)
    except NoProgressError as error:
        _refuse(process, error, requeue.NO_PROGRESS)
    except LauncherError as error:
        _fail(process, f"everstep: {error}")
    except Exception:
        _fail(process, traceback.format_exc())
    if any_left_behind():
        _exit(code)
    return code


def prepare_environment(environ: MutableMapping[str, str], topology: Topology) -> None:
    """Complete the variables that torch and DeepSpeed read, before either is imported.

    The number of CPU threads decides how sums are split, and so the bits of a loss: several ranks
    get one thread each, however they were started, unless the user says otherwise.
    """
    if topology.world_size > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    environ.update(
        RANK=str(topology.rank),
        WORLD_SIZE=str(topology.world_size),
        LOCAL_RANK=str(topology.local_rank),
        LOCAL_WORLD_SIZE=str(topology.local_world_size),
        MASTER_PORT=str(topology.master_port),
    )


def _live(
    composed: Settings | ConfigError,
    overrides: Sequence[str],
    process: RankProcess,
    place: Path | None,
    link: Path | None,
) -> int:
    from launcher import logs

    topology = process.topology
    on_terminal = moves_cursor(sys.stderr, process.environ)
    # Before DeepSpeed is imported, which logs as it is.
    logs.configure(topology.rank, on_terminal=on_terminal)
    from launcher import council, session

    timeout = council.MEETING_TIMEOUT
    if isinstance(composed, Settings):
        timeout = timedelta(minutes=composed.launch.start_timeout_minutes)
    members = council.meet(topology, process.environ, place, timeout)
    settings = members.settle_settings(composed, versions.installed())
    if topology.rank == 0:
        requeue.write_status(process.environ, requeue.STARTED)
        if place is not None:
            place.unlink(missing_ok=True)
    keeper.tell_limit(
        process.keeper_fd, settings.checkpoint.commit_deadline_seconds + _KEEPER_MARGIN_SECONDS
    )
    directory = RunDirectory(settings.run.dir)
    attempts = requeue.AttemptLog(directory.attempts, process)
    attempts.bring_up(overrides)
    code, cause = requeue.FAILED, "unknown"
    try:
        code, cause = session.Session(
            settings, process, members, directory, attempts, lambda text: _fail(process, text), link
        ).train()
    except BaseException as error:
        code = _code_of(error)
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        attempts.end(code, cause=cause)
    if topology.rank == 0:
        requeue.write_status(process.environ, str(code))
    return code


def _code_of(error: BaseException) -> int:
    if isinstance(error, ConfigError):
        return requeue.BAD_CONFIG
    return requeue.NO_PROGRESS if isinstance(error, NoProgressError) else requeue.FAILED


def _refuse(process: RankProcess, error: LauncherError, code: int) -> NoReturn:
    """End with a verdict. Rank 0 speaks for all ranks where all know the error."""
    rank = process.topology.rank
    if not error.settled:
        print(f"everstep: rank {rank}: {error}", file=sys.stderr)
    elif rank == 0:
        print(f"everstep: {error}", file=sys.stderr)
    if rank == 0:
        requeue.write_status(process.environ, str(code))
    _exit(code)


def _fail(process: RankProcess, text: str) -> NoReturn:
    """End this process now, without waiting for ranks that may hang.

    A starter of ours shows the first failure last, so it gets the text; any other starter's
    terminal gets it from here.
    """
    name = process.environ.get("EVERSTEP_ERROR_FILE")
    rank = process.topology.rank
    if name:
        content = {"time": time.time(), "text": text}
        temporary = Path(f"{name}.part")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(name)
    else:
        print("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()), file=sys.stderr)
    _exit(requeue.FAILED)


def _exit(code: int) -> NoReturn:
    """End without the interpreter's farewell, which can wait for threads of a broken group.

    And for a monitor: wandb 0.31.0 waits for its network then, for longer than a scheduler might.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
