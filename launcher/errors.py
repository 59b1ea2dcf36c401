"""What the launcher raises, and how each of them ends the process.

LauncherError
|-- ConfigError      the settings, the environment or the data cannot work: exit 78
|-- NoProgressError  the run keeps dying at the same step: exit 70
|-- GoingBackError   a rollback that is on record could not be followed in this process: exit 1
|-- SaveError        the checkpoint that the run must end with was not committed: exit 1
`-- HostError, SubmitError, RendezvousError (in hosts, launch_slurm, council)
                     what is needed to start does not answer now: exit 1
"""

import difflib
from collections.abc import Iterable, Sequence


class LauncherError(Exception):
    """Base of the errors that end a run with a message instead of a traceback."""

    settled = False
    """All ranks raise it, with the same message: rank 0 speaks for them."""


class ConfigError(LauncherError):
    """A setting is wrong; starting again without changing it cannot help."""


class NoProgressError(LauncherError):
    """Several attempts in a row ended at the step they began from."""


class GoingBackError(LauncherError):
    """The run could not go on from an older checkpoint; started again, it does."""


class SaveError(LauncherError):
    """The checkpoint that the run must end with was not committed."""


def one_of(words: Sequence[str]) -> str:
    """Return the words as a choice: `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar of `known`; None if none is similar."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the most similar of `known`, or lists them all."""
    names = sorted(known)
    if close := closest(word, names):
        return f"Did you mean {close!r}?"
    return f"Known here: {', '.join(names)}." if names else "Nothing can be set here."
