"""How a command line tool ends where nobody is to see a traceback; of engine and launcher alike."""

import os
import sys
from collections.abc import Callable

EXIT_INTERRUPTED = 130


def run(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code; 130 for Ctrl-C, which is said in `name`'s words.

    A reader of stdout that has seen enough (`... | head`) is no error: 0.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the exit must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
