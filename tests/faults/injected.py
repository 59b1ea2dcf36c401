"""A death, or a failing system call, at the n-th call that a piece of the product makes of the file
system. In this process: what has died makes no further call, and what it held open is closed.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

_CALLS = (
    *("open", "write", "pwrite", "ftruncate", "fsync", "fdatasync"),
    *("mkdir", "rename", "unlink", "rmdir", "listdir", "stat"),
)


class Killed(BaseException):
    """No handler of the product may take it for an error."""


@dataclass(frozen=True)
class Injection:
    """At call number `at`, from 1: death where `number` is None, else that errno."""

    at: int
    number: int | None = None


@contextlib.contextmanager
def injected(injection: Injection | None) -> Iterator[list[str]]:
    """While open, count calls and inject. Yields the list of what has fired: one name, or none."""
    fired: list[str] = []
    if injection is None:
        yield fired
        return
    lock = threading.Lock()
    count = 0

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                due = count == injection.at
                if due:
                    fired.append(name)
            if injection.number is None and fired:
                raise Killed(name)
            if due:
                raise OSError(injection.number, os.strerror(injection.number or 0))
            return call(*args, **kwargs)

        return counted

    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            stack.enter_context(mock.patch.object(os, name, wrapped(name, getattr(os, name))))
        yield fired


ERRORS = (errno.ENOSPC, errno.EIO)
