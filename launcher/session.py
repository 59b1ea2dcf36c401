"""What a rank does between meeting the others and parting from them: build, attempts, part.

A start is one attempt, as a rule. An alarm of the guards may have the ranks go back: they close the
attempt, and begin another from an older checkpoint, with the model that they have
(`launcher.guards`). What an attempt does is in `launcher.attempt`.

Everything here is collective: all ranks call it, in the same order. Errors that come from the
settings, the data or the checkpoint directory are settled among the ranks first and raised on all.
"""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import distributed

from engine.byte_bar import moves_cursor
from engine.protocol.layout import CheckpointDirectory
from engine.stream import Stream
from launcher import builders, process_group
from launcher.attempt import Attempt, RunOnRank
from launcher.cadence import planner_of
from launcher.config import Settings
from launcher.control import ControlFiles, refuse_leftover_stop
from launcher.council import Council
from launcher.guards import rollback
from launcher.monitors.monitors import monitors_of
from launcher.monitors.settings import check_packages
from launcher.progress import Progress
from launcher.rank import RankProcess
from launcher.requeue import AttemptLog
from launcher.run_directory import RunDirectory
from launcher.slurm_job import SlurmJob, TimeLimit
from launcher.starter_link import RankSide
from launcher.watchdog import Watchdog, limits_of


class Session:
    """One start of a run, on one rank: an attempt, and one more for every rollback.

    Call `train` once.

    Args:
        settings: equal on all ranks.
        process: this rank.
        council: where the ranks settle errors.
        directory: the run's; only rank 0 writes records to it.
        attempts: the log of its attempts.
        fail: ends this process with a text, from any thread: what the watchdog does.
        link: where a starter of ours on another host leaves its word.
    """

    def __init__(
        self,
        settings: Settings,
        process: RankProcess,
        council: Council,
        directory: RunDirectory,
        attempts: AttemptLog,
        fail: Callable[[str], object],
        link: Path | None,
    ) -> None:
        self._settings = settings
        self._topology = process.topology
        self._council = council
        is_rank_0 = process.topology.rank == 0
        progress = Progress(
            directory if is_rank_0 else None,
            total_steps=settings.train.steps,
            tokens_per_step=settings.batch.global_size * settings.data.seq_len,
            on_terminal=moves_cursor(sys.stderr, process.environ),
        )
        job = SlurmJob.of(process.environ, settings.launch) if is_rank_0 else None
        lead = settings.launch.stop_before_end_seconds
        self._run = RunOnRank(
            process=process,
            council=council,
            directory=directory,
            log=attempts,
            watchdog=Watchdog(limits_of(settings.launch), fail),
            progress=progress,
            rollbacks=rollback.Rollbacks(directory.rollbacks),
            control=ControlFiles(directory.path) if is_rank_0 else None,
            job=job,
            planner=planner_of(
                settings.checkpoint.auto if is_rank_0 else None, directory.path, progress.say
            ),
            stop_reasons=_stop_reasons(link, job, lead) if is_rank_0 else (),
        )
        self._went_back = 0

    def train(self) -> tuple[int, str]:
        """Train until the run is complete or all agreed to stop.

        Returns:
            The exit code and what led to it. Equal on all ranks.

        Raises:
            ConfigError, NoProgressError: on all ranks; nothing was trained.
            SaveError: the save that the run had to end with was not committed.
            GoingBackError: a rollback is on record, and could not be followed here.
        """
        run = self._run
        self._council.settled("control", lambda: refuse_leftover_stop(run.directory.path))
        checkpoint = self._settings.checkpoint
        self._council.settled(
            "checkpoints",
            lambda: run.log.refuse_lost_checkpoints(
                self._settings.resume, CheckpointDirectory(checkpoint.dir)
            ),
        )
        self._council.settled("monitors", self._build_monitors)
        run.watchdog.watch()
        with run.watchdog.phase("start"):
            process_group.join(self._topology, self._council)
            stream, left_out = self._build_stream()
            ds_engine = self._build()
        while True:
            attempt = Attempt(
                run,
                self._settings,
                ds_engine,
                stream,
                number=self._went_back,
                left_out=left_out,
            )
            with closing(run.progress):  # what is said of an error begins on a line of its own
                outcome = attempt.train()
            if outcome is not None:
                break
            self._went_back += 1
            with run.watchdog.phase("start"):
                stream, left_out = self._build_stream()
        self._part()
        return outcome

    def _build_monitors(self) -> None:
        if self._topology.rank == 0:
            check_packages(self._settings.deepspeed)
            environ = self._run.process.environ
            self._run.progress.monitors = monitors_of(self._settings, environ)

    def _build_stream(self) -> tuple[Stream, list[rollback.Range]]:
        """Return the stream, and what rollbacks have left out of it; rank 0 tells all ranks."""
        rollbacks, at = self._run.rollbacks, self._went_back

        def read() -> list[rollback.Range]:
            return rollbacks.ranges() if self._topology.rank == 0 else []

        found = self._council.settled(f"rollbacks/{at}", read)
        told = self._council.ask_rank_0(f"left out/{at}", lambda: json.dumps(found))
        left_out = [(first, end) for first, end in json.loads(told)]
        data = self._settings.data
        skip = tuple(dict.fromkeys([*data.skip, *left_out]))
        self._settings = replace(self._settings, data=replace(data, skip=skip))
        stream = self._council.settled(f"data/{at}", lambda: builders.build_stream(self._settings))
        return stream, left_out

    def _build(self) -> Any:
        settings, topology = self._settings, self._topology
        config = self._council.settled(
            "deepspeed", lambda: builders.deepspeed_config(settings, topology.world_size)
        )
        self._council.settled("model", lambda: builders.check_model(settings))
        model = builders.build_model(settings, config)
        self._council.settled("parameters", lambda: builders.check_parameters(model))
        ds_engine = builders.build_engine(model, settings, config)
        builders.seed_generators(settings.seed, topology.rank)
        return ds_engine

    def _part(self) -> None:
        """End together: a rank that leaves early can abort the others while they leave."""
        distributed.barrier()
        self._run.process.stop.ignore_from_now_on()
        distributed.destroy_process_group()
        self._run.directory.close()


def _stop_reasons(
    link: Path | None, job: SlurmJob | None, lead_seconds: float
) -> list[Callable[[], str | None]]:
    """Return what rank 0 asks at each step edge, besides its signals and the STOP file."""
    reasons = [] if link is None else [RankSide(link).look]
    end = job.end_time() if job is not None and lead_seconds else None
    if end is not None:
        reasons.append(TimeLimit(end, lead_seconds).look)
    return reasons
