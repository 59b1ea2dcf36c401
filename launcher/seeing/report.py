"""`everstep report RUN [--out DIR]`: a page about a run, to be opened in a browser, and its PNGs.

The page is one HTML file: its figures are in it, it asks for nothing over a network and has no
script, so that it can be mailed or kept. Works while the run lives, without torch, and with records
that are half-written, damaged or newer. It draws with matplotlib: the extra `report`. Exit codes: 0
written, 2 there is no such run, a file of limits that is none, no matplotlib, or nowhere to write.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.seeing.records import NoRunError, runs_in
from launcher.seeing.report_limits import Limits, LimitsError, read_limits
from launcher.seeing.summary import Summary, summarize

EXIT_USAGE = 2
PAGE_NAME = "index.html"


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="everstep report", description="Write a page about a run, with its figures."
    )
    parser.add_argument("dir", metavar="RUN", type=Path, help="a run directory: runs/NAME")
    parser.add_argument("--out", metavar="DIR", type=Path, help="RUN/report unless given")
    parser.add_argument(
        "--limits", metavar="FILE", type=Path, help="build/saving.json, which `make bench` writes"
    )
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        return _refuse(
            "the report is drawn with matplotlib, which is not installed: "
            "pip install 'everstep[report]'"
        )
    try:
        limits = read_limits(options.limits) if options.limits is not None else None
        runs = runs_in(options.dir)
    except (LimitsError, NoRunError) as error:
        return _refuse(str(error))
    if len(runs) > 1:
        names = ", ".join(path.name for path in runs)
        return _refuse(f"{options.dir}: a report is about one run; there are: {names}")
    (run,) = runs
    out = options.out or run / "report"
    try:
        size = write(summarize(run), out, limits)
    except OSError as error:
        return _refuse(f"--out {out}: cannot be written: {error.strerror}")
    print(f"{out / PAGE_NAME}: {size / 1e3:.0f} kB")
    return 0


def write(run: Summary, out: Path, limits: Limits | None = None) -> int:
    """Write the page and the PNGs of its figures to the directory `out`, which is made if need be.

    Returns:
        The bytes of the page.

    Raises:
        OSError: it cannot be written. A page that was there before is still whole.
    """
    from launcher.seeing import report_canvas, report_figures, report_page, report_series
    from launcher.seeing.report_words import loss_words, save_words, time_words

    loss, saves = report_series.loss_series(run), report_series.save_series(run)
    drawings: dict[str, tuple[report_canvas.Drawing, str]] = {}
    if loss.kept or loss.lost:
        drawings["loss"] = report_figures.loss_figure(loss), loss_words(run, loss)
    if saves.pause or saves.write or saves.commit:
        drawings["saves"] = report_figures.saves_figure(saves, limits), save_words(saves, limits)
    if run.goodput.wall:
        drawings["time"] = report_figures.time_figure(run.goodput.by_cause()), time_words(run)
    shown = {
        name: report_page.Shown(
            "".join(
                report_canvas.as_svg(name, drawing, words, narrow=narrow)
                for narrow in (False, True)
            ),
            words,
        )
        for name, (drawing, words) in drawings.items()
    }
    files = {
        f"{name}.png": report_canvas.as_png(drawing) for name, (drawing, _) in drawings.items()
    }
    files[PAGE_NAME] = report_page.page(run, loss, shown, limits).encode()
    _put(out, files)
    return len(files[PAGE_NAME])


def _put(out: Path, files: Mapping[str, bytes]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        partial = out / f".{name}.partial"
        try:
            partial.write_bytes(data)
            os.replace(partial, out / name)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def _refuse(message: str) -> int:
    print(f"everstep: {message}", file=sys.stderr)
    return EXIT_USAGE
