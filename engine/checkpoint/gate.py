"""Whether all ranks can save now: free images, failures so far, a newer attempt. Collective.

Both images of a rank may still be on their way to the disk when a save is due, or too many saves on
their way from the local tier to the shared directory: the disk is slower than the cadence.
`when_busy` says whether the training then waits for one, or goes on and leaves this save out, on
all ranks alike. Either is an event that names a cadence which the disk can sustain, measured here.
"""

import math
import time

from engine.checkpoint.collective import Severity, Verdict
from engine.checkpoint.errors import CheckpointError, FencedError
from engine.checkpoint.options import CheckpointOptions
from engine.checkpoint.saver import Saver
from engine.checkpoint.session import Session
from engine.format.names import tag_of


class Gate:
    """Lets saves through, on all ranks or on none."""

    def __init__(self, session: Session, saver: Saver, options: CheckpointOptions) -> None:
        self._session = session
        self._saver = saver
        self._options = options
        self._pace = _Pace()

    def pass_through(self, step: int, saved_step: int | None, when_busy: str | None) -> Severity:
        """Agree about a save of `step`; NONE if every rank has an image to stage it in.

        Blocks for as long as `when_busy`, or else the option of that name, makes it. `saved_step`
        is the step whose state is saved already. Every outcome but DONE and NONE was reported.

        Raises:
            FencedError: a newer attempt has taken this run over.
            CheckpointError: too many saves in a row have failed.
        """
        self._pace.arrive(step)
        severity, reason = self._own_finding(step, saved_step, when_busy or self._options.when_busy)
        verdict = self._session.agreement.reach(severity, reason)
        self._act_on(verdict, step)
        self._pace.leave(step)
        return verdict.severity

    def _own_finding(
        self, step: int, saved_step: int | None, when_busy: str
    ) -> tuple[Severity, str]:
        self._saver.finish_copy()
        self._saver.take_in()
        if self._saver.busy and when_busy == "wait":
            try:
                self._wait(step)
            except CheckpointError as error:
                return Severity.SKIP, str(error)
        if self._saver.fenced:
            return Severity.FENCED, "the attempt is closed: rank 0 ended, or a newer one took over"
        failures = self._saver.failures_in_a_row
        if failures >= self._options.max_failures:
            return Severity.STOP, (
                f"{failures} saves in a row have failed (checkpoint.max_failures="
                f"{self._options.max_failures}); the last one: {self._saver.last_failure}"
            )
        if self._session.rank == 0 and step == saved_step and not failures:
            return Severity.DONE, "the state of this step is saved already"
        if self._saver.busy:
            return Severity.BUSY, f"{self._saver.busy}; {self._hint()}"
        return Severity.NONE, ""

    def _wait(self, step: int) -> None:
        started, busy = time.monotonic(), self._saver.busy
        self._saver.wait_for_image(self._options.commit_deadline_seconds)
        self._session.emit(
            "waited",
            tag=tag_of(step),
            step=step,
            seconds=time.monotonic() - started,
            reason=f"{busy}; {self._hint()}",
        )

    def _hint(self) -> str:
        return self._pace.hint(self._saver.persist_seconds)

    def _act_on(self, verdict: Verdict, step: int) -> None:
        if verdict.severity is Severity.FENCED:
            raise FencedError(f"{verdict}; this attempt ({self._session.attempt}) must not go on")
        if verdict.severity is Severity.STOP:
            raise CheckpointError(str(verdict))
        if verdict.severity is Severity.SKIP:
            self._saver.fail(tag_of(step), str(verdict))
        if verdict.severity is Severity.BUSY:  # as set: not a failure
            self._session.emit("skipped", tag=tag_of(step), step=step, reason=str(verdict))


class _Pace:
    """How long a step takes between two saves, what the saves cost left out."""

    def __init__(self) -> None:
        self._left: tuple[int, float] | None = None
        self._step_seconds: float | None = None

    def arrive(self, step: int) -> None:
        if self._left is not None and step > self._left[0]:
            self._step_seconds = (time.monotonic() - self._left[1]) / (step - self._left[0])

    def leave(self, step: int) -> None:
        self._left = (step, time.monotonic())

    def hint(self, persist_seconds: float | None) -> str:
        if persist_seconds is None:
            return "no save of this attempt has been written yet"
        measured = f"the last shard took {persist_seconds:.3g} s to write"
        if not self._step_seconds:
            return f"{measured}; save no more often than that"
        steps = math.ceil(persist_seconds / self._step_seconds)
        return f"{measured}: checkpoint.every_steps={steps} or more can be sustained"
