"""What a report's figures show, in words: for captions, and for those who do not see them."""

from engine.describe import counted, duration_text
from launcher.seeing.report_limits import Limits
from launcher.seeing.report_series import LossSeries, SaveSeries
from launcher.seeing.summary import Summary


def loss_words(run: Summary, series: LossSeries) -> str:
    """Say what the figure of the loss shows."""
    if not series.kept:
        return "No kept step has a loss that can be drawn."
    (_, first), (end, last) = series.kept[0], series.kept[-1]
    lowest_at, lowest = min(series.kept, key=lambda point: point[1])
    broken = sum(span.broke_off for span in series.spans)
    parts = [
        f"Loss from {first:.4g} to {last:.4g} over {end:,.0f} {series.over}; the lowest is "
        f"{lowest:.4g}, at {lowest_at:,.0f}.",
        f"{counted(len(series.spans), 'attempt')} made steps; "
        + (f"{broken} of them broke off, at the dashed lines." if broken else "none broke off."),
    ]
    if run.goodput.lost_steps:
        parts.append(f"{counted(run.goodput.lost_steps, 'step')} came to nothing (pale).")
    return " ".join(parts)


def save_words(series: SaveSeries, limits: Limits | None) -> str:
    """Say what the figure of the saves shows."""
    medians = ", ".join(f"{what} {seconds:.3g} s" for what, seconds in series.medians.items())
    text = f"Rank 0's saves, on logarithmic axes; medians: {medians}."
    if limits is None:
        return f"{text} With --limits, what the machine can do is shown beside them."
    return (
        f"{text} Dashed: what the benchmark's machine can do, {limits.ranks} ranks at once, for "
        f"each of them: {limits.copy:.2f} GB/s from memory to memory, {limits.write:.2f} GB/s to "
        "disk."
    )


def time_words(run: Summary) -> str:
    """Say what the bar of the wall time shows."""
    found = run.goodput
    return (
        f"Of {duration_text(found.wall)}, from the first sign of the run to its last, "
        f"{found.share:.1%} became steps that were kept: the goodput."
    )
