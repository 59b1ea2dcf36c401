"""The benchmark's table, and what it says about the aims."""

import statistics
from collections.abc import Sequence
from typing import Any

_OURS = "everstep"
_DEFAULT = "DeepSpeed default"
_STEADY = 1.25  # the longest quiet step, at most so many times the shortest
_ROWS = (  # figure, whether in per cent
    ("pause", False),
    ("extra of the next steps", False),
    ("cost of a save", False),
    ("committed after", False),
    ("quiet step", False),
    ("step meanwhile / quiet", False),
    ("overhead at one per step", True),
    ("overhead at one per ten steps", True),
)


def text(results: dict[str, Any]) -> str:
    """Return all of it, as lines."""
    return "\n".join([*_head(results), *_table(results), *_commit(results), *_aims(results)])


def _head(results: dict[str, Any]) -> list[str]:
    size, load = results["bytes_per_rank"], results["load"]
    lines = [
        f"{results['ranks']} ranks, {size / 1e6:.0f} MB of state each, {results['rounds']} rounds "
        f"in turn, {results['cpus']} CPUs, load {load[0]:.1f} before and {load[-1]:.1f} after",
        "medians (least to most), seconds of the slowest rank",
        "",
    ]
    for name, seconds in results["figures"]["machine"].items():
        speed = size * results["ranks"] / statistics.median(seconds) / 1e9
        lines.append(f"  this machine: {name:12} {spread(seconds)}   {speed:.1f} GB/s in all")
    return lines


def _table(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, setup in results["setup"].items():
        lines += ["", f"  {name}: {setup}"]
        for what, per_cent in _ROWS:
            values = results["figures"][name][what]
            lines.append(f"    {what:30} {spread(values, per_cent)}")
    return lines


def _commit(results: dict[str, Any]) -> list[str]:
    commit = results["commit"]
    return [
        "",
        f"  commit of {commit['ranks']} simulated ranks: {commit['committed']:.2f} s, of which "
        f"{commit['read']:.2f} s to read receipts",
        f"  its manifest: {commit['manifest_bytes'] / 1e6:.2f} MB",
    ]


def _aims(results: dict[str, Any]) -> list[str]:
    def of(name: str, what: str) -> float:
        return float(statistics.median(results["figures"][name][what]))

    peers = [name for name in results["setup"] if name != _OURS]
    cheapest = min(peers, key=lambda name: of(name, "cost of a save"))
    pause, cost = of(_OURS, "pause"), of(_OURS, "cost of a save")
    slow = of(_OURS, "step meanwhile / quiet")
    commit = results["commit"]
    cpus, ranks = results["cpus"], results["ranks"]
    shared = (
        f"{ranks} trainers and {ranks} writers share {cpus} CPUs and their memory's bandwidth"
        if cpus < 2 * ranks
        else "other work on this machine, or the memory's bandwidth"
    )
    aims = (
        ("pause / warm copy", pause / of("machine", "warm copy"), 1.5, _pause_reason(results)),
        ("pause / DeepSpeed default's", pause / of(_DEFAULT, "pause"), 1 / 8, "see the pause"),
        (
            "committed after / raw write",
            of(_OURS, "committed after") / of("machine", "raw write"),
            1.3,
            f"it includes the pause, and {shared} with the steps that run meanwhile",
        ),
        ("step meanwhile / quiet", slow, 1.05, shared),
        (
            f"cost of a save - {cheapest}'s, s",
            cost - of(cheapest, "cost of a save"),
            0.0,
            f"ours varied by {_range(results, _OURS, 'cost of a save'):.3f} s, theirs by "
            f"{_range(results, cheapest, 'cost of a save'):.3f} s",
        ),
        ("commit of 4096 ranks, seconds", commit["committed"], 5.0, "a slow file system"),
        ("its manifest, MB", commit["manifest_bytes"] / 1e6, 2.0, "long names of parameters"),
    )
    return [*aim_lines(aims), *_disturbed(results)]


def aim_lines(aims: Sequence[tuple[str, float, float, str]]) -> list[str]:
    """Return a table of aims, each with what was found, what it may be at most, and why not."""
    lines = ["", f"  {'aim':38} {'at most':>8} {'found':>8}"]
    for what, found, limit, reason in aims:
        verdict = "" if found <= limit else f"   falls short: {reason}"
        lines.append(f"  {what:38} {limit:8.3f} {found:8.3f}{verdict}")
    return lines


def _disturbed(results: dict[str, Any]) -> list[str]:
    """Say so where quiet steps differ so much that extra seconds mean little."""
    quiet = [s for name in results["setup"] for s in results["figures"][name]["quiet step"]]
    ratio = max(quiet) / min(quiet)
    if ratio < _STEADY:
        return []
    return [
        "",
        f"  Quiet steps took {min(quiet):.3f} to {max(quiet):.3f} s in this run: the machine was",
        "  not quiet, and of what is compared with them only large differences mean anything.",
    ]


def _range(results: dict[str, Any], name: str, what: str) -> float:
    values = results["figures"][name][what]
    return float(max(values) - min(values))


def _pause_reason(results: dict[str, Any]) -> str:
    pause = statistics.median(results["figures"][_OURS]["pause"])
    copy = statistics.median(results["figures"]["machine"]["warm copy"])
    return (
        f"{pause - copy:.3f} s beyond the copy go to DeepSpeed's collecting of the state, to two "
        "agreements between the ranks and to the draft of the manifest, whatever the size"
    )


def spread(values: list[float], per_cent: bool = False) -> str:
    """Return the median, and the least and the most."""
    median, least, most = statistics.median(values), min(values), max(values)
    if per_cent:
        return f"{median:8.1%}   ({least:.1%} to {most:.1%})"
    return f"{median:8.3f}   ({least:.3f} to {most:.3f})"
