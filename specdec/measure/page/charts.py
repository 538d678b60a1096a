"""Three forms of charts: lines, dots in categories, stacked bars. Each becomes one inline SVG; matplotlib is lazy."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.measure.page.axes import STYLE, categories, log_scale, log_ticks, whole_ticks
from specdec.measure.page.palette import Palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.0  # inches; 960 pixels on the page
MOST_PANELS = 3  # side by side
ROW_HEIGHT = 0.27  # inches of one category
LETTER = 0.08  # inches of a letter along the y axis


class Line(NamedTuple):
    """Points of one series; low and high: ends of the 95% intervals, empty without; style: as matplotlib writes it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = "-"


class Dot(NamedTuple):
    """A value in a category (a line of the chart), its 95% interval, and the least it could be.

    interval: its half width, or how far it reaches below and above the value.
    """

    category: str
    name: str
    value: float
    interval: float | tuple[float, float] | None = None
    floor: float | None = None


def lines(panels: Mapping[str, Sequence[Line]], x: str, y: str, palette: Palette, log: str = "") -> str:
    """Draw lines of `panels` (title -> series). log: axes with logarithmic scales, "x", "y" or "xy"."""

    limits = _limits([line for own in panels.values() for line in own])

    def draw(axes: "Axes", own: Sequence[Line]) -> None:
        for line in own:
            _line(axes, line, palette)
        if "x" in log:
            log_ticks(axes, sorted({value for line in own for value in line.x}))
        else:
            whole_ticks(axes, [value for line in own for value in line.x])
        if "y" in log:
            log_scale(axes, "y", [value for line in own for value in line.y])
        else:
            axes.set_ylim(*limits)

    return _figure(panels, draw, x, y, lambda own: 2.6, share="y")


def dots(
    panels: Mapping[str, Sequence[Dot]], x: str, palette: Palette, *, y: str = "", is_log: bool = False, floor: str = ""
) -> str:
    """Draw dots with intervals of `panels`, a line a category. floor: the legend's name for the mark of the least."""
    everything = [dot for own in panels.values() for dot in own]

    def draw(axes: "Axes", own: Sequence[Dot]) -> None:
        cases = list(dict.fromkeys(dot.category for dot in own))
        names = _side_by_side(own)
        for dot in own:
            place = cases.index(dot.category) + _dodge(names.index(dot.name) if names else 0, len(names))
            _dot(axes, dot, place, palette, floor)
        categories(axes, cases)
        if is_log:
            log_scale(axes, "x", [v for dot in everything for v in (dot.value, dot.floor) if v])

    def height(own: Sequence[Dot]) -> float:
        lines_of_one = max(1.0, 0.55 * len(_side_by_side(own)))
        return _height(len({dot.category for dot in own}) * lines_of_one, y)

    return _figure(panels, draw, x, y, height, share="x")


def stacks(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    x: str,
    colours: Mapping[str, str],
    *,
    y: str = "",
    marks: Mapping[str, float] | None = None,
    mark: str = "floor",
) -> str:
    """Draw bars of `panels` (title -> category -> part -> length), parts end to end.

    marks: by category, a value that gets a black mark, called `mark` in the legend.
    """
    has_parts = len(colours) > 1

    def draw(axes: "Axes", own: Mapping[str, Mapping[str, float]]) -> None:
        for place, (category, parts) in enumerate(own.items()):
            left = 0.0
            for part, length in parts.items():
                axes.barh(
                    place, length, 0.62, left, color=colours[part], label=part if has_parts else None, linewidth=0
                )
                left += length
            if marks and category in marks:
                axes.plot([marks[category]], [place], "|", color="black", ms=13, mew=1.8, label=mark, linestyle="")
        categories(axes, list(own))
        axes.set_xlim(left=0, auto=True)  # the axis is shared: it must go on growing with the other panels' bars

    return _figure(panels, draw, x, y, lambda own: _height(len(own), y), share="x")


def _figure(
    panels: Mapping[str, Any],
    draw: Callable[["Axes", Any], None],
    x: str,
    y: str,
    height: Callable[[Any], float],
    share: str,
) -> str:
    """Draw every panel, at most three side by side, with one legend below them all. share: the axis alike in all."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    num_columns = min(len(panels), MOST_PANELS)
    num_rows = math.ceil(len(panels) / num_columns)
    tallest = max(height(own) for own in panels.values())
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, num_rows * (tallest + 0.45) + 0.35), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=share == "x", sharey=share == "y")
        for axes, (title, own) in zip(grid.flat, panels.items(), strict=False):
            draw(axes, own)
            axes.set_title(title)
            axes.set_xlabel(x)
            axes.tick_params(labelbottom=True)
            if axes in grid[:, 0]:
                axes.set_ylabel(y)
            elif share == "x" and _ticks(axes) == _ticks(grid[0, 0]):
                axes.tick_params(labelleft=False)
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        _legend(figure)
        return _svg(figure)


def _legend(figure: "Figure") -> None:
    """Put one entry for each name below the panels, in as many columns as fit."""
    found = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not found:
        return
    letters = max(map(len, found)) + 6
    num_columns = max(1, min(len(found), int(WIDTH * 13 / letters)))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=num_columns)


def _svg(figure: "Figure") -> str:
    """Return the SVG element alone: no XML header, no metadata, no scripts."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)


def _line(axes: "Axes", line: Line, palette: Palette) -> None:
    colour = palette.colour(line.name)
    style: dict[str, Any] = {"color": colour, "linestyle": line.style, "label": line.name}
    if line.style != ":":
        style |= {"marker": palette.marker(line.name), "markeredgecolor": "white", "markeredgewidth": 0.6}
    if line.low:
        below = [max(v - low, 0.0) for v, low in zip(line.y, line.low, strict=True)]
        above = [max(high - v, 0.0) for v, high in zip(line.y, line.high, strict=True)]
        axes.errorbar(line.x, line.y, yerr=(below, above), capsize=2.5, elinewidth=1.0, **style)
    else:
        axes.plot(line.x, line.y, **style)


def _dot(axes: "Axes", dot: Dot, place: float, palette: Palette, floor: str) -> None:
    colour = palette.colour(dot.name)
    if dot.floor is not None:
        axes.plot([dot.floor, dot.value], [place, place], color=colour, alpha=0.35, linewidth=1.2)
        axes.plot([dot.floor], [place], "|", color="black", ms=8, mew=1.4, label=floor, linestyle="")
    below, above = dot.interval if isinstance(dot.interval, tuple) else (dot.interval, dot.interval)
    axes.errorbar(
        *([dot.value], [place]),
        xerr=None if below is None or above is None else [[max(below, 0.0)], [max(above, 0.0)]],
        fmt=palette.marker(dot.name),
        color=colour,
        markeredgecolor="white",
        markeredgewidth=0.5,
        capsize=2.5,
        elinewidth=1.1,
        label=dot.name,
    )


def _height(num_rows: float, y: str) -> float:
    """Return the inches of a panel with that many lines, in which the y axis' own name `y` fits."""
    return 0.75 + max(num_rows * ROW_HEIGHT, len(y) * LETTER)


def _side_by_side(own: Sequence[Dot]) -> list[str]:
    """Return the names that share categories; none where each category has one."""
    pairs = {(dot.category, dot.name) for dot in own}
    return list(dict.fromkeys(dot.name for dot in own)) if len(pairs) > len({c for c, _ in pairs}) else []


def _dodge(index: int, count: int) -> float:
    """Return how far from the middle of its category the series `index` lies."""
    return 0.0 if count < 2 else (index / (count - 1) - 0.5) * min(0.66, 0.24 * (count - 1))


def _ticks(axes: "Axes") -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def _limits(everything: Sequence[Line]) -> tuple[float, float]:
    """Return the ends of the y axis of all panels: from zero where the least value is below half the largest."""
    values = [value for line in everything for value in (*line.y, *line.low, *line.high)]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = 0.05 * (high - low or abs(high) or 1.0)
    return (min(0.0, low) if low < 0.5 * high else low - margin), high + margin
