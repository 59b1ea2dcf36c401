"""What a rank does between meeting the others and parting from them: build, resume, train, close.

An alarm of the guards may have the ranks go back: they close the attempt, and begin another from an
older checkpoint, with the model that they have (`launcher.guards`).

Everything here is collective: all ranks call it, in the same order. Errors that come from the
settings, the data or the checkpoint directory are settled among the ranks first and raised on all.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

import engine
from engine.exchange import companions
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.stream import Stream, StreamLoader
from launcher import builders, logs, process_group, requeue, same_run
from launcher.cadence import Cadence, planner_of
from launcher.config import Settings
from launcher.control import ControlFiles, refuse_leftover_stop
from launcher.council import Council
from launcher.errors import (
    ConfigError,
    GoingBackError,
    LauncherError,
    NoProgressError,
    SaveError,
)
from launcher.guards import response, rollback
from launcher.guards.guard import Alarm, Guard
from launcher.loop import GUARD, LoopSettings, Position, StepLoop
from launcher.progress import Progress
from launcher.rank import RankProcess
from launcher.requeue import AttemptLog
from launcher.run_directory import RunDirectory
from launcher.schema import differences
from launcher.slurm_job import SlurmJob, TimeLimit
from launcher.starter_link import RankSide
from launcher.stop import Agreement
from launcher.watchdog import Watchdog, limits_of

T = TypeVar("T")

_INITIALIZED_FROM = "initialized_from"
"""Key of the client state: the identity of the directory that the run's weights came from."""


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
        self._process = process
        self._topology = process.topology
        self._council = council
        self._directory = directory
        self._attempts = attempts
        self._watchdog = Watchdog(limits_of(settings.launch), fail)
        self._control = ControlFiles(directory.path) if process.topology.rank == 0 else None
        self._job = (
            SlurmJob.of(process.environ, settings.launch) if process.topology.rank == 0 else None
        )
        self._stop_reasons = self._find_stop_reasons(link)
        self._changed: list[str] = []  # settings, since the checkpoint or the attempt before
        self._accepted: list[Any] = []  # what data.accept_changed accepted; rank 0 knows
        self._client_state: dict[str, Any] = {}
        self._rollbacks = rollback.Rollbacks(directory.rollbacks)
        self._left_out: list[rollback.Range] = []  # by rollbacks
        self._went_back = 0
        self._progress = Progress(
            directory if process.topology.rank == 0 else None,
            total_steps=settings.train.steps,
            tokens_per_step=settings.batch.global_size * settings.data.seq_len,
        )
        auto = settings.checkpoint.auto if process.topology.rank == 0 else None
        self._planner = planner_of(auto, directory.path, self._progress.say)

    def train(self) -> tuple[int, str]:
        """Train until the run is complete or all agreed to stop.

        Returns:
            The exit code and what led to it. Equal on all ranks.

        Raises:
            ConfigError, NoProgressError: on all ranks; nothing was trained.
            SaveError: the save that the run had to end with was not committed.
            GoingBackError: a rollback is on record, and could not be followed here.
        """
        self._settled("control", lambda: refuse_leftover_stop(self._directory.path))
        self._watchdog.watch()
        with self._watchdog.phase("start"):
            process_group.join(self._topology, self._council)
            stream = self._build_stream()
            ds_engine = self._build()
        while (outcome := self._attempt(ds_engine, stream)) is None:
            self._went_back += 1
            with self._watchdog.phase("start"):
                stream = self._build_stream()
        self._part()
        return outcome

    def _attempt(self, ds_engine: Any, stream: Stream) -> tuple[int, str] | None:
        """Resume and train; see `train`. None if an alarm has the run go back."""
        settings = self._settings
        refusals = GoingBackError if self._went_back else ConfigError
        with self._watchdog.phase("resume"), _refusals_as(refusals):
            record = getattr(ds_engine.module, companions.RECORD, None)
            excludes_frozen = settings.checkpoint.exclude_frozen
            if excludes_frozen and not self._went_back:
                self._take_weights(ds_engine)  # no checkpoint has the base: every start reads it
            checkpointer = self._attach(ds_engine, stream, record)
            resumed = checkpointer.resume(
                "must" if self._went_back else self._attempts.resume_mode(settings.resume),
                accept=lambda manifest: self._accept(manifest, stream, record),
                why_not=lambda manifest: rollback.why_spoilt(manifest, self._left_out),
            )
            if resumed is not None:
                self._client_state = dict(resumed.client_state)
                builders.align_schedule(ds_engine)
            elif not excludes_frozen:
                self._take_weights(ds_engine)
        steps = builders.steps_of(settings, stream)
        position = self._begin(checkpointer, resumed, steps)
        if position.step >= steps:
            checkpointer.close(wait_for_commit=False)
            more = "train.steps" if steps == settings.train.steps else "the components' epochs"
            self._progress.say(
                f"run {settings.run.name} is complete: its checkpoint is at step {position.step} "
                f"of {steps}. Raise {more} to train on."
            )
            return requeue.DONE, "already complete"
        return self._run_loop(ds_engine, checkpointer, stream, position, steps)

    def _build_stream(self) -> Stream:
        """Return the stream without what rollbacks have left out; rank 0 tells all ranks."""

        def read() -> list[rollback.Range]:
            return self._rollbacks.ranges() if self._topology.rank == 0 else []

        found = self._settled("rollbacks", read)
        told = self._council.ask_rank_0(self._phase("left out"), lambda: json.dumps(found))
        self._left_out = [(first, end) for first, end in json.loads(told)]
        data = self._settings.data
        skip = tuple(dict.fromkeys([*data.skip, *self._left_out]))
        self._settings = replace(self._settings, data=replace(data, skip=skip))
        return self._settled("data", lambda: builders.build_stream(self._settings))

    def _event(self, event: dict[str, Any]) -> None:
        """Take what the engine tells of saves."""
        self._progress.event(event)
        if self._planner is not None:
            self._planner.observe(event)

    def _event_of_all(self, event: Mapping[str, Any]) -> None:
        """Tell once what every rank has found."""
        if self._topology.rank == 0:
            self._progress.event(event)

    def _build(self) -> Any:
        settings, topology = self._settings, self._topology
        config = self._settled(
            "deepspeed", lambda: builders.deepspeed_config(settings, topology.world_size)
        )
        self._settled("model", lambda: builders.check_model(settings))
        model = builders.build_model(settings, config)
        self._settled("parameters", lambda: builders.check_parameters(model))
        ds_engine = builders.build_engine(model, settings, config)
        builders.seed_generators(settings.seed, topology.rank)
        return ds_engine

    def _take_weights(self, ds_engine: Any) -> None:
        """Read `model.init_from`; every checkpoint says what it was."""
        directory = self._settings.init_from
        if directory is not None:
            identity = engine.initialize_from(ds_engine, directory)
            self._client_state = {_INITIALIZED_FROM: identity}
            self._progress.event({"event": "initialized", **identity})

    def _attach(
        self, ds_engine: Any, stream: Stream, record: dict[str, Any] | None
    ) -> engine.Checkpointer:
        checkpoint = self._settings.checkpoint
        best = checkpoint.keep_best
        checkpointer = engine.attach(
            ds_engine,
            checkpoint.dir,
            engine.CheckpointOptions(
                local_dir=checkpoint.local_dir,
                keep_last=checkpoint.keep_last,
                keep_every_steps=checkpoint.keep_every_steps,
                keep_best=None if best is None else engine.KeepBest(**asdict(best)),
                bytes_per_second=checkpoint.max_bytes_per_second,
                commit_deadline_seconds=checkpoint.commit_deadline_seconds,
                lease=engine.Lease(seconds=checkpoint.lease_seconds),
                writer_silence_seconds=checkpoint.writer_silence_seconds,
                max_failures=checkpoint.max_failures,
                when_busy=checkpoint.when_busy,
                exclude_frozen=checkpoint.exclude_frozen,
                base_name=self._settings.init_from or self._settings.model["_target_"],
                verify_on_resume=checkpoint.verify_on_resume,
                paranoid=checkpoint.paranoid,
            ),
            on_event=self._event,
            keeper_fd=self._process.keeper_fd,
            fingerprint=same_run.identity(self._settings, stream, record),
        )
        self._progress.attempt = checkpointer.attempt
        logs.write_to(self._directory.log_file(checkpointer.attempt, self._topology.rank))
        return checkpointer

    def _accept(self, manifest: Manifest, stream: Stream, record: dict[str, Any] | None) -> None:
        """Refuse another run's checkpoint. The engine asks on rank 0 and tells all ranks."""
        spoilt = rollback.why_spoilt(manifest, self._left_out)
        if spoilt and not self._settings.data.accept_changed:
            raise engine.ResumeError(
                f"checkpoint {manifest.tag}: {spoilt}. To go on from it all the same, take the "
                f"line of that rollback out of {self._rollbacks.path}."
            )
        try:
            findings = same_run.check(manifest, self._settings, stream, record)
        except ConfigError as error:
            raise engine.ResumeError(str(error)) from error
        self._changed = list(findings.free)
        self._accepted = same_run.accepted_changes(manifest, findings.data)
        if findings.data:
            self._progress.event(
                {"event": "data_changed", **self._accepted[-1], "tag": manifest.tag}
            )

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
        earlier = self._attempts.earlier()
        self._settled(
            "progress",
            lambda: requeue.check_progress(
                earlier, position.step, settings.launch.max_attempts_without_progress
            ),
            NoProgressError,
        )
        if self._topology.rank == 0:
            self._directory.keep_first_configuration(settings.as_dict())
            self._compare_settings(checkpointer.attempt, resumed is not None)
        self._attempts.start(checkpointer.attempt, position.step, self._changed)
        for change in self._changed:
            self._progress.say(f"note: {change}.")
        begins = f"resumes at step {position.step}" if resumed is not None else "starts"
        self._progress.say(
            f"run {run.name}, attempt {checkpointer.attempt}: {begins}, {steps} "
            f"steps on {self._topology.world_size} ranks, in {run.dir}"
        )
        if steps < settings.train.steps:
            self._progress.say(
                f"note: the data end before train.steps={settings.train.steps}, after step {steps}."
            )
        return position

    def _run_loop(
        self,
        ds_engine: Any,
        checkpointer: engine.Checkpointer,
        stream: Stream,
        position: Position,
        steps: int,
    ) -> tuple[int, str] | None:
        settings, topology = self._settings, self._topology
        loader = StreamLoader(
            stream,
            micro_batch_size=settings.batch.micro_size,
            dp_rank=topology.rank,
            dp_world_size=topology.world_size,
            sample_offset=position.sample_offset,
            global_batch_size=settings.batch.global_size,
            workers=settings.data.workers,
            prefetch_batches=settings.data.prefetch_batches,
            pin_memory=builders.uses_accelerator(),
        )
        loop = StepLoop(
            LoopSettings(
                steps=steps,
                accumulation_steps=settings.accumulation_steps(topology.world_size),
                global_batch_size=settings.batch.global_size,
            ),
            engine=ds_engine,
            batches=iter(loader),
            checkpoints=checkpointer,
            cadence=Cadence(
                every_steps=settings.checkpoint.every_steps,
                every_minutes=settings.checkpoint.every_minutes,
                planner=self._planner,
            ),
            control=self._control,
            agreement=Agreement(distributed.new_group(backend="gloo"), topology.world_size),
            stop=self._process.stop,
            stop_reasons=self._stop_reasons,
            guard=Guard(
                settings.guard,
                scales_loss=bool(ds_engine.fp16_enabled()),
                state=self._client_state.pop(GUARD, None),
                tell=self._event_of_all,
            ),
            watchdog=self._watchdog,
            progress=self._progress,
            position=position,
            stream_state=lambda offset: {
                **stream.state(offset),
                "accepted_changes": self._accepted,
            },
            client_state=self._client_state,
        )
        if self._planner is not None and not self._went_back:
            self._planner.restarted(self._attempts.seconds)
        try:
            self._progress.begin(position.step)
            complete = loop.run()
        except engine.CheckpointError as error:
            raise SaveError(str(error)) from error
        finally:
            self._attempts.step = loop.position.step
            loader.close()
        if loop.alarm is not None:
            return self._act_upon(loop.alarm, checkpointer, loop.position, stream)
        return self._close(checkpointer, loop, complete, moved=loop.position != position)

    def _act_upon(
        self, alarm: Alarm, checkpointer: engine.Checkpointer, position: Position, stream: Stream
    ) -> tuple[int, str] | None:
        """Close the attempt; go back, which is None, or stop."""
        settings = self._settings
        with self._watchdog.phase("save"):
            self._close_checkpointer(checkpointer)
            self._progress.close()
            skip = rollback.window(
                settings.guard,
                stream.order.skips,
                sample_offset=position.sample_offset,
                global_batch_size=settings.batch.global_size,
            )
            answer = response.Response(settings, self._rollbacks, self._progress)
            done = self._council.ask_rank_0(
                self._phase("alarm"), lambda: answer.to(alarm, checkpointer.attempt, skip)
            )
        if done == response.BACK:
            self._attempts.go_back(f"goes back: {alarm.words}")
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
        step, stop = loop.position.step, self._process.stop
        if not complete:
            cause = stop.cause or "another rank was asked to stop"
            if loop.stopped_by_file:
                cause = "the STOP file"
            self._progress.event({"event": "stopped", "step": step, "reason": cause})
        with self._watchdog.phase("save"):
            committed = self._close_checkpointer(checkpointer)
        self._progress.close()
        if moved and not (committed and loop.has_staged_its_position):
            raise SaveError(
                f"the checkpoint of step {step}, with which the run had to end, was not "
                f"committed; events.jsonl in {self._settings.run.dir} says why. Start it again: "
                "it resumes from the newest committed one."
            )
        if loop.stopped_by_file and self._control is not None:
            self._control.stop_is_done()
        if complete:
            self._progress.say(f"done: {step} steps, and the checkpoint of the last is committed.")
            return requeue.DONE, "done"
        if self._job is not None:
            cause = self._job.why_stopped(cause)
        saved = "saved" if moved else "before its first step"
        self._progress.say(f"stopped at step {step} ({cause}), {saved}: start it again to go on.")
        # With the file somebody has asked that no scheduler starts it again either.
        return (requeue.DONE if loop.stopped_by_file else requeue.SAVED), cause

    def _find_stop_reasons(self, link: Path | None) -> list[Callable[[], str | None]]:
        """Return what rank 0 asks at each step edge, besides its signals and the STOP file."""
        if self._topology.rank != 0:
            return []
        reasons = [] if link is None else [RankSide(link).look]
        lead = self._settings.launch.stop_before_end_seconds
        end = self._job.end_time() if self._job is not None and lead else None
        if end is not None:
            reasons.append(TimeLimit(end, lead).look)
        return reasons

    def _compare_settings(self, attempt: int, resumed: bool) -> None:
        """Note what changed since the attempt before; of a checkpoint's own, `_accept` has it."""
        now = json.loads(json.dumps(self._settings.as_dict()))
        before = self._directory.settings_before(attempt)
        self._directory.keep_settings(attempt, now)
        for key, was, value in differences(before, now) if before is not None else ():
            if not (resumed and key.startswith(("optimizer.", "schedule.", "train."))):
                self._changed.append(
                    f"{key} was {was!r} in the attempt before and is {value!r} now"
                )

    def _part(self) -> None:
        """End together: a rank that leaves early can abort the others while they leave."""
        distributed.barrier()
        self._process.stop.ignore_from_now_on()
        distributed.destroy_process_group()
        self._directory.close()

    def _settled(
        self, phase: str, action: Callable[[], T], kind: type[LauncherError] = ConfigError
    ) -> T:
        """Run an action on every rank, and raise on all of them what any of them raises."""
        result: list[T] = []
        message = None
        try:
            result.append(action())
        except kind as error:
            message = str(error)
        self._council.settle(self._phase(phase), message, kind)
        return result[0]

    def _phase(self, name: str) -> str:
        """Return the name of a phase of this attempt, for the council, which wants each once."""
        return f"{name}/{self._went_back}"


@contextmanager
def _refusals_as(kind: type[LauncherError]) -> Iterator[None]:
    """What the engine refuses at start is about the directory, the model or the data."""
    try:
        yield
    except (
        engine.CheckpointError,
        engine.ExchangeError,
        engine.ResumeError,
        engine.RunHeldError,
        engine.UnsuitableDirectoryError,
        FormatError,
    ) as error:
        refusal = kind(str(error))
        refusal.settled = True  # the engine raises on every rank alike
        raise refusal from error
