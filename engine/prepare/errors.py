"""What stops the tool, with a message instead of a traceback.

PrepareError
|-- UsageError   the arguments cannot work
`-- InputError   a document cannot be used: names its file and where in it
"""

from __future__ import annotations


class PrepareError(Exception):
    """Base of the errors that end the tool with a message."""


class UsageError(PrepareError):
    """The arguments, or what they name, cannot work."""


class InputError(PrepareError):
    """A document cannot be used."""
