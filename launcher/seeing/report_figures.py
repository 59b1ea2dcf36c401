"""The figures of a report: loss over samples, what the saves took, where the wall time went."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from launcher.seeing.report_canvas import Canvas, Drawing
from launcher.seeing.report_limits import Limits
from launcher.seeing.report_series import LossSeries, Point, SaveSeries

_LOG_FROM = 20.0  # the largest by the smallest, from which a logarithmic axis shows more
_LABELLED = 0.08  # of the width, for an attempt's number to have room
_MANY = 20  # lines from top to bottom, with more of which the curve would not be seen
_FOOT_OF_MANY = 0.92
_CROWD = 100  # points, from which they are small
_FOOT = 0.035  # of the height, where marks of the saves stand


def loss_figure(series: LossSeries) -> Drawing:
    """The loss over samples: attempts as bands, lost steps pale, saves and failures as marks."""
    return Drawing(lambda canvas: _loss(canvas, series), height=3.6)


def saves_figure(series: SaveSeries, limits: Limits | None) -> Drawing:
    """The seconds of every save over steps, and below them GB/s beside what the machine can do."""
    return Drawing(lambda canvas: _saves(canvas, series, limits), height=5.0, rows=2)


def time_figure(seconds: Mapping[str, float]) -> Drawing:
    """The wall time by cause, as one bar."""
    return Drawing(lambda canvas: _time(canvas, seconds), height=0.8)


def _loss(canvas: Canvas, series: LossSeries) -> None:
    (axes,), colours = canvas.axes, canvas.colours
    foot = axes.get_xaxis_transform()  # x of the data, y of the axes
    canvas.title(0, "loss")
    canvas.below(series.over)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.broken_barh(
        [(span.begin, span.end - span.begin) for span in series.spans[1::2]],
        (0, 1),
        transform=foot,
        color=colours["band"],
        linewidth=0,
        zorder=0,
    )
    for number, stretch in enumerate(series.lost):
        axes.plot(
            *_columns(stretch),
            color=colours["lost"],
            alpha=0.4,
            linewidth=5.0,  # a halo: after an exact resume the kept steps have the same losses
            solid_capstyle="butt",
            label="lost steps" if number == 0 else None,
        )
    axes.plot(*_columns(series.kept), color=colours["kept"], linewidth=1.6, label="kept steps")
    losses = [y for points in (series.kept, *series.lost) for _, y in points]
    if min(losses) > 0 and max(losses) / min(losses) > _LOG_FROM:
        _make_logarithmic(axes)
    broken = sum(span.broke_off for span in series.spans)
    for span in series.spans:
        if span.broke_off:
            axes.axvline(
                span.end,
                _FOOT_OF_MANY if broken > _MANY else 0.0,
                color=colours["lost"],
                linewidth=1.0,
                linestyle=(0, (4, 3)),
            )
    for places, colour, marker, size, label in (
        (series.gone, "saving", "|", 40, "checkpoint, pruned since"),
        (series.stored, "saving", "^", 34, "checkpoint"),
        (series.failed_saves, "lost", "x", 34, "failed save"),
        (series.alarms, "lost", "D", 26, "alarm"),
        (series.non_finite, "lost", "*", 44, "loss not finite"),
    ):
        if places:
            axes.scatter(
                places,
                [_FOOT] * len(places),
                transform=foot,
                color=colours[colour],
                marker=marker,
                s=size,
                linewidth=1.4 if marker in "|x" else 0,
                label=label,
                zorder=3,
            )
    axes.margins(x=0.01)
    _number_spans(canvas, series)
    canvas.explain(0, columns=4)


def _number_spans(canvas: Canvas, series: LossSeries) -> None:
    """Write the numbers of the attempts that have room for one."""
    axes = canvas.axes[0]
    low, high = axes.get_xlim()
    for span in series.spans:
        if span.number is not None and span.end - span.begin > _LABELLED * (high - low):
            axes.annotate(
                f"{span.number}" if canvas.narrow else f"attempt {span.number}",
                ((span.begin + span.end) / 2, 1.0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, -3),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize="small",
                color=canvas.colours["muted"],
            )


def _saves(canvas: Canvas, series: SaveSeries, limits: Limits | None) -> None:
    times, speeds = canvas.axes
    canvas.title(0, "seconds")
    canvas.title(1, "GB/s of rank 0")
    canvas.below("step")
    speeds.xaxis.set_major_formatter(FuncFormatter(_short))
    for axes, points, colour, marker, label in (
        (times, series.commit, "down", "s", "until committed"),
        (times, series.write, "saving", "o", "write"),
        (times, series.pause, "kept", "^", "pause"),
        (speeds, series.write_speed, "saving", "o", "write"),
        (speeds, series.pause_speed, "kept", "^", "pause"),
    ):
        axes.scatter(
            *_columns(points),
            color=canvas.colours[colour],
            marker=marker,
            s=22 if len(points) < _CROWD else 9,
            linewidth=0,
            label=label,
        )
    if limits is not None:
        for speed, colour in ((limits.copy, "kept"), (limits.write, "saving")):
            speeds.axhline(
                speed, color=canvas.colours[colour], linewidth=1.2, linestyle=(0, (5, 3))
            )
    for axes in canvas.axes:
        _make_logarithmic(axes)
    canvas.explain(0, columns=3)


def _time(canvas: Canvas, seconds: Mapping[str, float]) -> None:
    (axes,) = canvas.axes
    wall, begin = sum(seconds.values()), 0.0
    for cause, value in seconds.items():
        axes.barh(
            0, value / wall * 100, left=begin, color=canvas.colours[cause], height=1, label=cause
        )
        begin += value / wall * 100
    axes.set_xlim(0, 100)
    axes.margins(y=0)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.spines["bottom"].set_visible(False)
    canvas.explain(0, columns=8)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _make_logarithmic(axes: Any) -> None:
    """Give the y axis a logarithmic scale, with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _short(value: float, _: object = None) -> str:
    """Return an axis' number: 12k, 3.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
