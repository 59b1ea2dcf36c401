"""What a report's figures are drawn on, with matplotlib: SVG for the page, and PNG.

In the SVG every colour is a CSS variable of the page, and text is text in the page's font, so that
one drawing serves light and dark. There are two of each figure: for a wide page and for a phone.
Legends are the page's, except in a PNG.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Paul Tol's and Okabe and Ito's palettes: told apart by people who do not see all colours.
LIGHT: Mapping[str, str] = {
    "page": "#ffffff",
    "ink": "#1c2026",
    "muted": "#5c6570",
    "grid": "#e3e6ea",
    "band": "#f3f5f8",
    "kept": "#0066a6",
    "lost": "#c8500a",
    "starting": "#e3a008",
    "resuming": "#5ab4e5",
    "saving": "#00875f",
    "stopping": "#b86a9b",
    "down": "#8b939d",
    "other": "#c9ced4",
}
DARK: Mapping[str, str] = {
    "page": "#14171b",
    "ink": "#e7eaee",
    "muted": "#9aa4b0",
    "grid": "#2a3038",
    "band": "#1b2026",
    "kept": "#58aee8",
    "lost": "#f0803c",
    "starting": "#eab54a",
    "resuming": "#2f7fb3",
    "saving": "#2fb98c",
    "stopping": "#cf8fb8",
    "down": "#6d7681",
    "other": "#414a55",
}
# Colours that nobody would choose, each to be found again and replaced by its variable.
_PLACEHOLDERS = {role: f"#0102{number:02x}" for number, role in enumerate(LIGHT, 0x10)}

_WIDE, _NARROW = 9.6, 4.5  # inches; the page scales them to its width
_FONT = {"wide": 10.0, "narrow": 9.5}


class Canvas:
    """A figure to be drawn on: its axes, its colours, and how wide it will be seen."""

    def __init__(
        self, drawing: "Drawing", colours: Mapping[str, str], *, narrow: bool, legend: bool
    ) -> None:
        self.colours, self.narrow, self.legend = colours, narrow, legend
        self.figure = Figure(
            figsize=(_NARROW if narrow else _WIDE, drawing.height), layout="constrained"
        )
        self.figure.patch.set_alpha(0.0)
        self.axes: Sequence[Any] = list(
            self.figure.subplots(drawing.rows, 1, sharex=True, squeeze=False)[:, 0]
        )
        for axes in self.axes:
            axes.patch.set_alpha(0.0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(colours["muted"])
            axes.tick_params(colors=colours["muted"], which="both", length=3, width=0.8)
            axes.tick_params(axis="y", which="both", length=0)
            axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
            axes.set_axisbelow(True)

    def title(self, row: int, text: str) -> None:
        """Say above the axes what is on its y axis: beside it, it would take a phone's width."""
        self.axes[row].set_title(text, loc="left", color=self.colours["muted"], fontsize="medium")

    def below(self, text: str) -> None:
        """Say what is on the x axis."""
        self.axes[-1].set_xlabel(text, color=self.colours["muted"], loc="right")

    def explain(self, row: int, columns: int) -> None:
        """Put a legend over the axes, if this drawing has to have one."""
        if self.legend and self.axes[row].get_legend_handles_labels()[0]:
            self.axes[row].legend(
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                ncols=columns,
                frameon=False,
                labelcolor=self.colours["ink"],
                fontsize="small",
            )


@dataclass(frozen=True)
class Drawing:
    """What draws one figure: so many axes above one another, so many inches high in all."""

    draw: Callable[[Canvas], None]
    height: float
    rows: int = 1


def as_svg(name: str, drawing: Drawing, alt: str, *, narrow: bool) -> str:
    """Return a figure as an `svg` element, with the page's colours and font.

    Args:
        name: makes its ids differ from those of other figures of the page.
        alt: says in words what is to be seen.
    """
    buffer = io.StringIO()
    _save(drawing, _PLACEHOLDERS, buffer, "svg", narrow=narrow, legend=False)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    prefix = f"{name}-narrow" if narrow else name
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    for role, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, f"var(--{role})")
    text = re.sub(r' (?:width|height)="[^"]*pt"', "", text, count=2)  # the page gives the size
    head = f'<svg class="{"narrow" if narrow else "wide"}" role="img" aria-label="{escape(alt)}"'
    return head + text.removeprefix("<svg")


def as_png(drawing: Drawing) -> bytes:
    """Return a figure as a PNG file, for slides and mails: light, with its legend."""
    buffer = io.BytesIO()
    _save(drawing, LIGHT, buffer, "png", narrow=False, legend=True)
    return buffer.getvalue()


def _save(
    drawing: Drawing,
    colours: Mapping[str, str],
    into: Any,
    kind: str,
    *,
    narrow: bool,
    legend: bool,
) -> None:
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "everstep",  # the same records give the same file
        "font.size": _FONT["narrow" if narrow else "wide"],
        "axes.formatter.useoffset": False,
    }
    with matplotlib.rc_context(settings):
        canvas = Canvas(drawing, colours, narrow=narrow, legend=legend)
        drawing.draw(canvas)
        if kind == "png":
            canvas.figure.savefig(into, format="png", dpi=130, facecolor=colours["page"])
        else:
            canvas.figure.savefig(into, format="svg", metadata={"Date": None})
