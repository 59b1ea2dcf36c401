"""Errors of the data stream.

StreamError
├── FingerprintMismatch   the data of now are not the data of the checkpoint
└── WorkerDied            a loader's worker process ended without being asked to
"""

from __future__ import annotations

from collections.abc import Sequence


class StreamError(Exception):
    """The stream cannot be built, or cannot give the sample that is due."""


class FingerprintMismatch(StreamError):  # noqa: N818 - it states a finding, not a failure
    """The data of now would not continue the run's order of samples.

    Attributes:
        differences: lines that say what differs, each path followed by both values.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class WorkerDied(StreamError):  # noqa: N818 - the name is the report
    """A worker process of the loader ended without being asked to."""
