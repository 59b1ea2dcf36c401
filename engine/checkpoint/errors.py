"""Errors of saving.

CheckpointError
|- RefusedError         a kind of training whose state cannot be saved yet
|- UnfaithfulSaveError  what was written is not what was live
`- FencedError          a newer attempt has taken this run over
"""


class CheckpointError(Exception):
    """Saving cannot go on."""


class RefusedError(CheckpointError):
    """The engine holds state that DeepSpeed does not hand to a checkpoint."""


class UnfaithfulSaveError(CheckpointError):
    """A committed checkpoint holds other bytes than the live state had at its step."""


class FencedError(CheckpointError):
    """A newer attempt has taken over; this one must stop."""
