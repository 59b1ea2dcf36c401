"""Errors of resuming.

ResumeError
|- NothingToResumeError   a checkpoint was demanded, and there is none, or none intact
|- DamagedShardError      a file of a checkpoint is damaged, missing, or another save's
`- MismatchError          the checkpoint is of another model or optimizer
"""


class ResumeError(Exception):
    """The run cannot continue from a checkpoint."""


class NothingToResumeError(ResumeError):
    """A checkpoint was demanded, and there is none, or none that is intact."""


class DamagedShardError(ResumeError):
    """A file of the checkpoint is damaged, missing, or another save's."""


class MismatchError(ResumeError):
    """The checkpoint is of another model or optimizer."""
