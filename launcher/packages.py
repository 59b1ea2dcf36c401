"""Are `launcher`, `engine` and `conf` the ones that belong together?

They are plain top-level names, so a folder of the same name in the current directory, or in
another package's tree, can shadow one of them. Looks them up without importing them.
"""

import importlib.util
from importlib.machinery import PathFinder
from pathlib import Path

from launcher.errors import ConfigError

NAMES = ("launcher", "engine", "conf")


def check_directory(directory: Path) -> None:
    """Raise ConfigError if ranks started in a directory would find another package there.

    `python -m` looks into the current directory first; the program `everstep`, which may have
    started this process, does not.
    """
    root = Path(__file__).resolve().parent.parent
    if directory.resolve() == root:
        return
    for name in NAMES:
        spec = PathFinder.find_spec(name, [str(directory)])
        if spec is not None and spec.origin is not None:
            raise ConfigError(
                f"{spec.origin} would shadow the package {name!r} of {root} in the ranks: rename "
                "it, or start from another directory."
            )


def check() -> None:
    """Raise ConfigError, naming the folder in the way, unless all three are siblings."""
    root = Path(__file__).resolve().parent.parent
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ConfigError(f"the package {name!r} is missing: install everstep again.")
        places = list(spec.submodule_search_locations or [])
        found = Path(places[0] if places else spec.origin or "?").resolve()
        if found.parent != root:
            raise ConfigError(
                f"the package {name!r} that Python finds is {found}, which is not the one beside "
                f"{root / 'launcher'}: it shadows ours. Rename that folder, or start from another "
                "directory."
            )
