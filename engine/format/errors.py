"""Errors of the checkpoint format.

::

    FormatError                  bytes or values that the format does not allow
    ├── DamagedError             bytes changed after they were written, or were never a whole file
    ├── UnknownVersionError      written by a version of Everstep that this one cannot read
    └── UnsupportedValueError    a value that has no exact representation in the state tree
"""


class FormatError(Exception):
    """Bytes or values that the checkpoint format does not allow."""


class DamagedError(FormatError):
    """Bytes that do not match their checksum or digest, or that end too early."""


class UnknownVersionError(FormatError):
    """A format version that this version of Everstep does not know."""


class UnsupportedValueError(FormatError):
    """A value in the training state that cannot be stored exactly as JSON."""
