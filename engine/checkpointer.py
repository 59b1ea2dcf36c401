"""Resume, save and close, on all ranks together: what `engine.attach` returns.

Every rank makes the same calls in the same order; all of them are collective except `poll`, and all
run on the training thread. What may fail on one rank alone (a full disk, a damaged shard, a value
that cannot be stored) is kept, agreed upon over a CPU group, and then raised or reported on all
ranks alike: nothing is raised inside DeepSpeed's own collectives.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint import base, preflight, rng
from engine.checkpoint.collective import Severity
from engine.checkpoint.deepspeed_engine import StateDict
from engine.checkpoint.draft import DraftWriter, Lineage, Progress, encode_state
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.gate import Gate
from engine.checkpoint.options import CheckpointOptions
from engine.checkpoint.plan import state_keys_ahead
from engine.checkpoint.proof import Digests, Prover, digests_of
from engine.checkpoint.saver import Saver
from engine.checkpoint.session import Session
from engine.checkpoint.snapshot import Snapshot, collect
from engine.checkpoint.zero3 import buffers, optimizer_kind
from engine.format.errors import FormatError
from engine.format.manifest import Base, Manifest
from engine.format.names import SaveId, tag_of
from engine.resume.resume import Resumer

logger = logging.getLogger(__name__)

# What may keep one rank from staging.
_ERRORS = (CheckpointError, FormatError, OSError, ValueError, MemoryError)

# A commit's deadline counts from the seal; its writer needs a moment to say that it has passed.
_DEADLINE_MARGIN_SECONDS = 30.0
# A writer without work signs off in milliseconds, but it is of low priority.
_SIGN_OFF_SECONDS = 30.0


@dataclass(frozen=True)
class ResumedState:
    """What a run continues from.

    tag            the checkpoint
    step           optimizer steps done
    sample_offset  samples consumed by all ranks: the next global index
    stream         state of the data stream, as it was given to `save`
    client_state   as it was given to `save`
    """

    tag: str
    step: int
    sample_offset: int
    stream: Any
    client_state: dict[str, Any]


class Checkpointer:
    """One attempt's saves and its resume. Made by `engine.attach`."""

    def __init__(
        self, session: Session, saver: Saver, options: CheckpointOptions, fingerprint: Any
    ) -> None:
        self.attempt = session.attempt
        self._session = session
        self._agreement = session.agreement
        self._saver = saver
        self._options = options
        self._fingerprint = fingerprint
        self._gate = Gate(session, saver, options)
        self._prover = Prover(session) if options.paranoid else None
        self._optimizer_kind = optimizer_kind(session.ds_engine)
        self._drafts: DraftWriter | None = None
        self._saves = 0
        self._saved_step: int | None = None
        self._wait_seconds = options.commit_deadline_seconds + _DEADLINE_MARGIN_SECONDS

    @property
    def last_committed_step(self) -> int | None:
        """The newest step that this attempt has committed or resumed from; rank 0 knows.

        One that is in the local tier only does not count.
        """
        return self._saver.last_committed_step

    @property
    def fenced(self) -> bool:
        """Whether a newer attempt has taken this run over, as far as this rank has been told.

        Rank 0 is told by its writer within seconds, the others when they save. The next `save`
        raises FencedError on all ranks, so call it at once.
        """
        return self._saver.fenced

    def resume(
        self,
        mode: str = "auto",
        accept: Callable[[Manifest], None] = lambda manifest: None,
        why_not: Callable[[Manifest], str] = lambda manifest: "",
    ) -> ResumedState | None:
        """Continue from a checkpoint, or start fresh. Collective; once, before the first save.

        Args:
            mode: "auto", the newest intact checkpoint of this run, or a fresh start where there
                never was one; "must", the newest one or an error; "never", a fresh start; or a tag.
            accept: called on rank 0 with the manifest; may refuse it by raising a ResumeError.
            why_not: called on rank 0 with every manifest that "auto" and "must" might take; gives a
                reason to pass it over for an older one, or an empty text. There is no fresh start
                where all were passed over.

        Returns the state to continue from, None on a fresh start. The random number generators are
        restored last, so call this right before the first step. The checkpoint may have been saved
        by any number of ranks; at another number than this run's the generators are derived anew
        (`engine.checkpoint.rng.derive`), which is an event.

        Raises ResumeError, or CheckpointError where there is no room for what saving takes, on
        every rank alike.
        """
        whole = {**buffers(self._buffer_states()), **rng.capture()}
        options = self._options
        full = options.verify_on_resume == "full"
        resumer = Resumer(self._session, full=full, base_name=options.base_name)
        resumed = resumer.resume(mode, whole, accept, why_not)
        manifest = resumed.manifest
        parent = None if manifest is None else manifest.save_id
        lineage = Lineage(resumed.history, parent, self._fingerprint)
        self._drafts = DraftWriter(
            self._session.layout, self._optimizer_kind, lineage, self._base_of_drafts()
        )
        if self._session.rank == 0:
            self._drafts.prepare()
        self._prepare(tag_of(0 if manifest is None else manifest.step))
        if manifest is None:
            return None
        if resumed.rng_is_own:
            rng.restore(resumed.rng)
        elif resumed.rng:
            rng.derive(resumed.rng, manifest.sample_offset, self._session.layout.rank)
        self._saved_step = manifest.step
        if resumed.is_local:
            self._saver.drain(manifest)
        else:
            self._saver.last_committed_step = manifest.step
        return ResumedState(
            manifest.tag,
            manifest.step,
            manifest.sample_offset,
            manifest.stream,
            resumed.client_state,
        )

    def save(
        self,
        step: int,
        *,
        sample_offset: int,
        stream: Any = None,
        client_state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        when_busy: str | None = None,
    ) -> bool:
        """Stage the state after `step` optimizer steps, and hand it to the writers. Collective.

        Blocks for about one memory copy of the rank's state; longer only while both images are
        still being written, if it is to wait then. What changes after it has returned does not
        reach the checkpoint. (On an accelerator the copy may go on until the next step changes the
        parameters; DeepSpeed's step waits for it.)

        Args:
            step: optimizer steps done; the checkpoint becomes tag `global_step{step}`.
            sample_offset: samples consumed by all ranks since the run began.
            stream: state of the data stream, JSON.
            client_state: the caller's own state, equal on all ranks, of the types of
                `engine.format.tree`.
            metrics: by name, equal on all ranks: what `keep_best` compares.
            when_busy: "wait" or "skip", for this save; the option of that name otherwise.

        Returns True if the state of this step is staged, here or before; False if the save was
        given up, which an event explains.

        Raises:
            FencedError: a newer attempt has taken this run over.
            CheckpointError: `max_failures` saves in a row have failed, or the metric of `keep_best`
                is not among `metrics`.
        """
        best = self._options.keep_best
        if best is not None and best.metric not in (metrics or {}):
            raise CheckpointError(
                f"keep_best compares {best.metric!r}, which save() was not given; it was given "
                f"{sorted(metrics or {})}"
            )
        if self._drafts is None:
            raise CheckpointError(
                "call resume() before the first save(): it sets the run's history"
            )
        started = time.monotonic()
        tag = tag_of(step)
        if self._prover is not None:
            self._prover.prove()
        severity = self._gate.pass_through(step, self._saved_step, when_busy)
        if severity is not Severity.NONE:
            return severity is Severity.DONE
        collected = collect(self._session, tag)
        self._saves += 1
        save_id = SaveId(self.attempt, self._saves, tag, self._session.nonce)
        progress = Progress(step, sample_offset, stream, client_state or {}, metrics or {})
        draft = self._stage(save_id, collected, progress, started)
        if draft is None:
            return False
        self._saver.seal(draft or None, time.monotonic() - started)
        self._saved_step = step
        return True

    def poll(self) -> None:
        """Take in what the writer reports; replace a dead writer. Not collective, no waiting."""
        self._saver.take_in()

    def close(self, wait_for_commit: bool = True) -> bool:
        """End the attempt. Collective; the ranks leave together.

        With `wait_for_commit`, blocks until every staged save is committed or abandoned, for at
        most the commit deadline; without, the writers finish on their own. Returns True if the
        newest staged save is known to be committed.

        Raises UnfaithfulSaveError on every rank if `paranoid` has found one.
        """
        if wait_for_commit:
            self._saver.settle(self._wait_seconds)
        newest = self._saver.last_committed_step
        committed = self._saved_step is not None and newest == self._saved_step
        outcome = bool(self._agreement.broadcast(committed))
        try:
            if wait_for_commit and self._prover is not None:
                self._prover.prove()
        finally:
            self._agreement.barrier()
            self._saver.close(_SIGN_OFF_SECONDS if wait_for_commit else 0.0)
        return outcome

    def _stage(
        self,
        save_id: SaveId,
        collected: dict[str, StateDict],
        progress: Progress,
        started: float,
    ) -> bytes | None:
        """Copy the collected state into an image on all ranks; None if one of them cannot.

        Returns the manifest's draft as JSON on rank 0, nothing on the others.
        """
        assert self._drafts is not None, "save() has checked it"
        draft, reason = b"", ""
        digests: Digests = {}
        try:
            snapshot = Snapshot.of(self._session.layout, collected)
            zero = collected["optimizer"]["optimizer_state_dict"]
            state = encode_state(collected["model"], zero, progress)
            plan = self._saver.plan(snapshot.structure, self._options.commit_deadline_seconds)
            if self._session.rank == 0:
                draft = self._drafts.begin(save_id, plan, snapshot.live, state, progress)
            if self._prover is not None:
                digests = digests_of(self._session.layout, snapshot)
            self._saver.stage(save_id, plan, snapshot)
            if self._session.rank == 0:
                draft = self._drafts.end(draft, time.monotonic() - started)
        except _ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
        verdict = self._agreement.reach(Severity.SKIP if reason else Severity.NONE, reason)
        if verdict.severity is Severity.NONE:
            if self._prover is not None:
                self._prover.remember(save_id, digests)
            return draft
        self._saver.fail(save_id.tag, str(verdict))
        return None

    def _prepare(self, tag: str) -> None:
        """Plan and make images ahead of the first save; a failure is that save's to report.

        Raises CheckpointError on all ranks where memory or disk are too small.
        """
        collected = collect(self._session, tag)
        size = 0
        try:
            snapshot = Snapshot.of(self._session.layout, collected)
            ahead = state_keys_ahead(self._optimizer_kind, snapshot.live.hyperparameters[0])
            size = self._saver.size_ahead(snapshot.structure, ahead)
        except _ERRORS as error:
            logger.warning("nothing is prepared for saving yet: %s", error)
        preflight.check(self._session, size, self._options)
        try:
            self._saver.reserve(size)
        except _ERRORS as error:
            logger.warning("no images are made yet: %s", error)

    def _base_of_drafts(self) -> Base | None:
        """Return the identity of the frozen parameters, if shards do not hold them. Collective."""
        if not self._options.exclude_frozen:
            return None
        digests = base.digests_of(self._session)
        return Base(self._options.base_name, tuple(digests.values()))

    def _buffer_states(self) -> dict[str, Any]:
        module = self._session.ds_engine.module_state_dict()
        return {"module": module, "buffer_names": self._session.ds_engine._get_buffer_names()}
