"""What the commands of the benchmarks have in common: where they work, and what they keep."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json FILE`; `about` is the module's docstring."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    made.add_argument("--json", type=Path, help="write the figures there, too")
    return made


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return one on the working directory's file system: the temporary one may be memory."""
    return tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=Path.cwd())


def keep(results: dict[str, Any], path: Path | None) -> None:
    """Write the figures, if somebody wants them."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
