"""One attempt of a run, on one rank: attach, resume, train, close.

Everything here is collective: all ranks call it, in the same order. Errors that come from the
settings, the data or the checkpoint directory are settled among the ranks first and raised on all.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed

import engine
from engine import inspect
from engine.exchange import companions
from engine.stream import Stream, StreamLoader
from launcher import builders, logs, requeue, same_run, saving
from launcher.cadence import Cadence, Planner
from launcher.comparison import Comparison
from launcher.config import Settings
from launcher.control import ControlFiles
from launcher.council import Council
from launcher.errors import ConfigError, GoingBackError, NoProgressError, SaveError
from launcher.guards import response, rollback
from launcher.guards.guard import Alarm, Guard
from launcher.loop import GUARD, LoopSettings, Position, StepLoop
from launcher.progress import Progress
from launcher.rank import RankProcess
from launcher.requeue import AttemptLog
from launcher.run_directory import RunDirectory
from launcher.slurm_job import SlurmJob
from launcher.stop import Agreement
from launcher.watchdog import Watchdog

_INITIALIZED_FROM = "initialized_from"
"""Key of the client state: the identity of the directory that the run's weights came from."""


@dataclass(frozen=True)
class RunOnRank:
    """What all attempts of one start share on this rank.

    council       where the ranks settle errors
    directory     the run's; only rank 0 writes records to it
    log           of the run's attempts
    control, job, planner  of rank 0, where there are such; None elsewhere
    stop_reasons  what rank 0 asks at each step edge, besides its signals and the STOP file
    """

    process: RankProcess
    council: Council
    directory: RunDirectory
    log: AttemptLog
    watchdog: Watchdog
    progress: Progress
    rollbacks: rollback.Rollbacks
    control: ControlFiles | None
    job: SlurmJob | None
    planner: Planner | None
    stop_reasons: Sequence[Callable[[], str | None]]


class Attempt:
    """One attempt, with a model and a stream that are there. Call `train` once.

    Args:
        run: what it shares with the others.
        settings: equal on all ranks.
        ds_engine: of the model; after a rollback the one of the attempt before.
        number: of the attempts that this start has made before, by going back.
        left_out: samples that rollbacks have left out of the stream.
    """

    def __init__(
        self,
        run: RunOnRank,
        settings: Settings,
        ds_engine: Any,
        stream: Stream,
        *,
        number: int,
        left_out: Sequence[rollback.Range],
    ) -> None:
        self._run = run
        self._settings = settings
        self._ds_engine = ds_engine
        self._stream = stream
        self._number = number
        self._record = getattr(ds_engine.module, companions.RECORD, None)
        self._comparison = Comparison(
            settings, stream, run.progress, run.rollbacks, left_out, self._record
        )
        self._client_state: dict[str, Any] = {}
        self._guard: Guard | None = None

    def train(self) -> tuple[int, str] | None:
        """Train until the run is complete, all agreed to stop, or an alarm has the run go back.

        Returns:
            The exit code and what led to it; None for going back. Equal on all ranks.

        Raises:
            As `launcher.session.Session.train`.
        """
        settings = self._settings
        refusals = GoingBackError if self._number else ConfigError
        with self._run.watchdog.phase("resume"), saving.refusals_as(refusals):
            excludes_frozen = settings.checkpoint.exclude_frozen
            if excludes_frozen and not self._number:
                self._take_weights()  # no checkpoint has the base: every start reads it
            checkpointer = self._attach()
            resumed = checkpointer.resume(
                "must" if self._number else self._run.log.resume_mode(settings.resume),
                accept=self._comparison.accept,
                why_not=self._comparison.why_not,
            )
            if resumed is not None:
                self._client_state = dict(resumed.client_state)
                builders.align_schedule(self._ds_engine)
            elif not excludes_frozen:
                self._take_weights()
        steps = builders.steps_of(settings, self._stream)
        position = self._begin(checkpointer, resumed, steps)
        if position.step >= steps:
            checkpointer.close(wait_for_commit=False)
            more = "train.steps" if steps == settings.train.steps else "the components' epochs"
            self._run.progress.say(
                f"run {settings.run.name} is complete: its checkpoint is at step {position.step} "
                f"of {steps}. Raise {more} to train on."
            )
            return requeue.DONE, "already complete"
        return self._run_loop(checkpointer, position, steps)

    def _take_weights(self) -> None:
        """Read `model.init_from`; every checkpoint says what it was."""
        directory = self._settings.init_from
        if directory is not None:
            identity = engine.initialize_from(self._ds_engine, directory)
            self._client_state = {_INITIALIZED_FROM: identity}
            self._run.progress.event({"event": "initialized", **identity})

    def _attach(self) -> engine.Checkpointer:
        checkpointer = engine.attach(
            self._ds_engine,
            self._settings.checkpoint.dir,
            saving.options_of(self._settings),
            on_event=self._event,
            on_progress=self._run.progress.under_way,
            keeper_fd=self._run.process.keeper_fd,
            fingerprint=same_run.identity(self._settings, self._stream, self._record),
        )
        self._run.progress.attempt = checkpointer.attempt
        logs.write_to(
            self._run.directory.log_file(checkpointer.attempt, self._run.process.topology.rank)
        )
        return checkpointer

    def _begin(
        self,
        checkpointer: engine.Checkpointer,
        resumed: engine.ResumedState | None,
        steps: int,
    ) -> Position:
        """Record where this attempt starts, and say so."""
        settings, run = self._settings, self._settings.run
        position = Position(0, 0)
        if resumed is not None:
            position = Position(resumed.step, resumed.sample_offset)
        earlier = self._run.log.earlier()
        self._run.council.settled(
            f"progress/{self._number}",
            lambda: requeue.check_progress(
                earlier, position.step, settings.launch.max_attempts_without_progress
            ),
            NoProgressError,
        )
        if self._run.process.topology.rank == 0:
            self._run.directory.keep_first_configuration(settings.as_dict())
            self._comparison.with_attempt_before(self._run.directory, checkpointer.attempt)
        self._run.log.start(checkpointer.attempt, position.step, self._comparison.changed)
        for change in self._comparison.changed:
            self._run.progress.say(f"note: {change}.")
        begins = f"resumes at step {position.step}" if resumed is not None else "starts"
        self._run.progress.say(
            f"run {run.name}, attempt {checkpointer.attempt}: {begins}, {steps} "
            f"steps on {self._run.process.topology.world_size} ranks, in {run.dir}"
        )
        if steps < settings.train.steps:
            self._run.progress.say(
                f"note: the data end before train.steps={settings.train.steps}, after step {steps}."
            )
        return position

    def _run_loop(
        self, checkpointer: engine.Checkpointer, position: Position, steps: int
    ) -> tuple[int, str] | None:
        settings, topology = self._settings, self._run.process.topology
        loader = StreamLoader(
            self._stream,
            micro_batch_size=settings.batch.micro_size,
            dp_rank=topology.rank,
            dp_world_size=topology.world_size,
            sample_offset=position.sample_offset,
            global_batch_size=settings.batch.global_size,
            workers=settings.data.workers,
            prefetch_batches=settings.data.prefetch_batches,
            pin_memory=builders.uses_accelerator(),
        )
        self._guard = Guard(
            settings.guard,
            scales_loss=bool(self._ds_engine.fp16_enabled()),
            begin_step=position.step,
            state=self._client_state.pop(GUARD, None),
            tell=self._event_of_all,
        )
        loop = StepLoop(
            LoopSettings(
                steps=steps,
                accumulation_steps=settings.accumulation_steps(topology.world_size),
                global_batch_size=settings.batch.global_size,
            ),
            engine=self._ds_engine,
            batches=iter(loader),
            checkpoints=checkpointer,
            cadence=Cadence(
                every_steps=settings.checkpoint.every_steps,
                every_minutes=settings.checkpoint.every_minutes,
                planner=self._run.planner,
            ),
            control=self._run.control,
            agreement=Agreement(distributed.new_group(backend="gloo"), topology.world_size),
            stop=self._run.process.stop,
            stop_reasons=self._run.stop_reasons,
            guard=self._guard,
            watchdog=self._run.watchdog,
            progress=self._run.progress,
            position=position,
            stream_state=lambda offset: {
                **self._stream.state(offset),
                "accepted_changes": self._comparison.accepted,
            },
            client_state=self._client_state,
        )
        if self._run.planner is not None and not self._number:
            self._run.planner.restarted(self._run.log.seconds)
        try:
            self._run.progress.begin(position.step, steps, self._committed_age())
            complete = loop.run()
        except engine.CheckpointError as error:
            raise SaveError(str(error)) from error
        finally:
            self._run.log.step = loop.position.step
            loader.close()
            self._run.progress.end_steps()
        if loop.alarm is not None:
            return self._act_upon(loop.alarm, checkpointer, loop.position)
        return self._close(checkpointer, loop, complete, moved=loop.position != position)

    def _committed_age(self) -> float | None:
        manifest = self._comparison.checkpoint
        now = datetime.datetime.now(datetime.timezone.utc)
        return None if manifest is None else inspect.age_of(manifest, now).total_seconds()

    def _act_upon(
        self, alarm: Alarm, checkpointer: engine.Checkpointer, position: Position
    ) -> tuple[int, str] | None:
        """Close the attempt; go back, which is None, or stop."""
        settings = self._settings
        with self._run.watchdog.phase("save"):
            self._close_checkpointer(checkpointer)
            self._run.progress.close()
            skip = rollback.window(
                settings.guard,
                self._stream.order.skips,
                sample_offset=position.sample_offset,
                global_batch_size=settings.batch.global_size,
            )
            answer = response.Response(settings, self._run.rollbacks, self._run.progress)
            done = self._run.council.ask_rank_0(
                f"alarm/{self._number}", lambda: answer.to(alarm, checkpointer.attempt, skip)
            )
        if done == response.BACK:
            self._run.log.go_back(f"goes back: {alarm.words}")
            return None
        return requeue.NO_PROGRESS, alarm.words

    def _close_checkpointer(self, checkpointer: engine.Checkpointer) -> bool:
        """Wait for the last save; tell whether it is committed."""
        try:
            return checkpointer.close(wait_for_commit=True)
        except engine.CheckpointError as error:
            raise SaveError(str(error)) from error

    def _close(
        self, checkpointer: engine.Checkpointer, loop: StepLoop, complete: bool, *, moved: bool
    ) -> tuple[int, str]:
        """Wait until the last save is durable on all ranks: the verdict promises it."""
        step, stop = loop.position.step, self._run.process.stop
        if not complete:
            cause = stop.cause or "another rank was asked to stop"
            if loop.stopped_by_file:
                cause = "the STOP file"
            self._run.progress.event({"event": "stopped", "step": step, "reason": cause})
        with self._run.watchdog.phase("save"):
            committed = self._close_checkpointer(checkpointer)
        self._run.progress.close()
        if moved and not (committed and loop.has_staged_its_position):
            raise SaveError(
                f"the checkpoint of step {step}, with which the run had to end, was not "
                f"committed; events.jsonl in {self._settings.run.dir} says why. Start it again: "
                "it resumes from the newest committed one."
            )
        if loop.stopped_by_file and self._run.control is not None:
            self._run.control.stop_is_done()
        if complete:
            self._run.progress.say(
                f"done: {step} steps, and the checkpoint of the last is committed."
            )
            return requeue.DONE, "done"
        if self._run.job is not None:
            cause = self._run.job.why_stopped(cause)
        saved = "saved" if moved else "before its first step"
        self._run.progress.say(
            f"stopped at step {step} ({cause}), {saved}: start it again to go on."
        )
        # With the file somebody has asked that no scheduler starts it again either.
        return (requeue.DONE if loop.stopped_by_file else requeue.SAVED), cause

    def _event(self, event: dict[str, Any]) -> None:
        """Take what the engine tells of saves."""
        self._run.progress.event(event)
        if self._run.planner is not None:
            self._run.planner.observe(event)
        if self._guard is not None and event["event"] == "committed":
            self._guard.committed(event["tag"], event.get("same_weights_as"))

    def _event_of_all(self, event: Mapping[str, Any]) -> None:
        """Tell once what every rank has found."""
        if self._run.process.topology.rank == 0:
            self._run.progress.event(event)
