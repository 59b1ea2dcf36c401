"""What an attempt goes on from, compared with what it is about to do; and what changed, in words.

Rank 0 alone compares: the engine asks it about a checkpoint, and tells all ranks what it says.
"""

import json
from collections.abc import Sequence
from typing import Any

import engine
from engine.format.manifest import Manifest
from engine.stream import Stream
from launcher import same_run
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.guards import rollback
from launcher.progress import Progress
from launcher.run_directory import RunDirectory
from launcher.schema import differences

_COMPARED_WITH_THE_CHECKPOINT = ("optimizer.", "schedule.", "train.")


class Comparison:
    """Of one attempt with the checkpoint that it resumes from, and with the attempt before it.

    Args:
        rollbacks: which samples rollbacks have left out: `left_out`.
        record: of a Hugging Face model, what `engine.exchange.companions` keeps of it.
    """

    def __init__(
        self,
        settings: Settings,
        stream: Stream,
        progress: Progress,
        rollbacks: rollback.Rollbacks,
        left_out: Sequence[rollback.Range],
        record: dict[str, Any] | None,
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._progress = progress
        self._rollbacks = rollbacks
        self._left_out = left_out
        self._record = record
        self.checkpoint: Manifest | None = None
        """What was accepted; None on a fresh start."""
        self.changed: list[str] = []
        """A sentence on each setting that is not what it was, and may be so."""
        self.accepted: list[Any] = []
        """What `data.accept_changed` has accepted in the life of the run, JSON."""

    def why_not(self, manifest: Manifest) -> str:
        """Return why a checkpoint is passed over for an older one; an empty text if it is not."""
        return rollback.why_spoilt(manifest, self._left_out)

    def accept(self, manifest: Manifest) -> None:
        """Take a checkpoint of this run.

        Raises:
            ResumeError: it is another's, or has used samples that a rollback has left out since.
        """
        spoilt = self.why_not(manifest)
        if spoilt and not self._settings.data.accept_changed:
            raise engine.ResumeError(
                f"checkpoint {manifest.tag}: {spoilt}. To go on from it all the same, take the "
                f"line of that rollback out of {self._rollbacks.path}."
            )
        try:
            findings = same_run.check(manifest, self._settings, self._stream, self._record)
        except ConfigError as error:
            raise engine.ResumeError(str(error)) from error
        self.checkpoint = manifest
        self.changed = list(findings.free)
        self.accepted = same_run.accepted_changes(manifest, findings.data)
        if findings.data:
            self._progress.event(
                {"event": "data_changed", **self.accepted[-1], "tag": manifest.tag}
            )

    def with_attempt_before(self, directory: RunDirectory, attempt: int) -> None:
        """Add what changed since the attempt before; keep the settings for the one after."""
        now = json.loads(json.dumps(self._settings.as_dict()))
        before = directory.settings_before(attempt)
        directory.keep_settings(attempt, now)
        for key, was, value in differences(before, now) if before is not None else ():
            if self.checkpoint is None or not key.startswith(_COMPARED_WITH_THE_CHECKPOINT):
                self.changed.append(f"{key} was {was!r} in the attempt before and is {value!r} now")
