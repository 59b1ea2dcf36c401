"""Errors of resuming.

ResumeError
|- NothingToResumeError   a checkpoint was demanded, and there is none, or none intact
|- DamagedShardError      this rank cannot read its part of a checkpoint
`- MismatchError          the checkpoint is of another model, optimizer or world size
"""


class ResumeError(Exception):
    """The run cannot continue from a checkpoint."""


class NothingToResumeError(ResumeError):
    """A checkpoint was demanded, and there is none, or none that is intact."""


class DamagedShardError(ResumeError):
    """A file of the checkpoint is damaged, missing, or another save's."""


class MismatchError(ResumeError):
    """The checkpoint is of another model, optimizer or world size."""
