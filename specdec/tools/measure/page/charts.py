"""Charts as inline SVG: lines over numbers, dots and stacked bars over categories. matplotlib is imported when
drawing."""

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.core import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 10.0  # inches; 960 pixels on the page
MOST_PANELS = 3  # side by side
LETTERS = 48  # per line of a category's name
# Okabe and Ito's colours without yellow, which is too light on white, and two more: safe for colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
MARKERS = "os^DvPXp"
PLAIN = frozenset({"plain", "plain decoding", "none"})  # grey, and dashed if a name contains one of them
FLOOR = "floor"
STYLE: Any = {
    **{"font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "specdec"},
    **{"axes.titlesize": "medium", "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.edgecolor": "0.5"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True},
    **{"grid.color": "0.9", "legend.frameon": False, "lines.markersize": 5, "errorbar.capsize": 2.5},
}


class Point(NamedTuple):
    """A value of a series in a panel, drawn at `x`: a number in lines, the name of a category in dots and bars.

    interval: ends of its 95% interval; floor: the least it could be.
    """

    panel: str
    series: str
    x: Any
    y: float
    interval: tuple[float, float] | None = None
    floor: float | None = None


class Charts:
    """Draws the charts of one page: a name has the same colour and marker in all of them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def look(self, name: str) -> dict[str, Any]:
        """Return colour and marker of the series `name`."""
        if name in PLAIN:
            return {"color": "#555555", "marker": "o"}
        number = self._numbers.setdefault(name, len(self._numbers))
        return {"color": COLOURS[number % 8], "marker": MARKERS[(number + number // 8) % 8]}

    def lines(self, points: Sequence[Point], x: str, y: str, log: str = "") -> str:
        """Draw a line per series. log: axes with logarithmic scales, "x", "y" or "xy"; others begin at zero."""

        def draw(axes: "Axes", own: Sequence[Point]) -> None:
            for name, line in grouped(own, lambda point: point.series).items():
                line = sorted(line, key=lambda point: point.x)
                look = self.look(name) | {"linestyle": "--" if PLAIN & set(name.split(", ")) else "-"}
                error = [_reach(point) for point in line] if line[0].interval else None
                yerr = None if error is None else list(zip(*error, strict=True))
                axes.errorbar([p.x for p in line], [p.y for p in line], yerr, label=name, elinewidth=1, **look)
            floors = sorted({(point.x, point.floor) for point in own if point.floor is not None})
            if floors:
                axes.plot(*zip(*floors, strict=True), linestyle=":", color="black", label=FLOOR)
            _scale(axes, "y", points, "y" in log)
            if "x" in log:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:g}")
            else:
                axes.locator_params(axis="x", integer=True)

        return _figure(points, draw, x, y, 2.6)

    def dots(self, points: Sequence[Point], x: str, y: str, log: str = "") -> str:
        """Draw a dot per point with its interval and floor, a row per category. log: "x" if values may be far apart."""
        cases = list(dict.fromkeys(point.x for point in points))
        names = list(dict.fromkeys(point.series for point in points))
        is_shared = len({(point.x, point.series) for point in points}) > len(cases)
        step = min(0.24, 0.66 / max(len(names) - 1, 1)) if is_shared else 0.0

        def draw(axes: "Axes", own: Sequence[Point]) -> None:
            for point in own:
                place = cases.index(point.x) + step * (names.index(point.series) - (len(names) - 1) / 2)
                look, error = self.look(point.series), [[reach] for reach in _reach(point)]
                if point.floor is not None:
                    axes.plot([point.floor, point.y], [place, place], color=look["color"], alpha=0.35)
                    axes.plot(point.floor, place, "|", color="black", markersize=9, markeredgewidth=1.5, label=FLOOR)
                xerr = error if point.interval else None
                axes.errorbar(point.y, place, xerr=xerr, label=point.series, linestyle="", **look)
            _categories(axes, cases)
            _scale(axes, "x", points, "x" in log)

        return _figure(points, draw, x, y, _height(cases, 1 + 0.55 * (len(names) - 1) * is_shared))

    def bars(self, points: Sequence[Point], x: str, y: str, log: str = "") -> str:
        """Draw a bar per category, the series as its parts end to end."""
        cases = list(dict.fromkeys(point.x for point in points))

        def draw(axes: "Axes", own: Sequence[Point]) -> None:
            ends = dict.fromkeys(cases, 0.0)
            for point in own:
                place, colour = cases.index(point.x), self.look(point.series)["color"]
                axes.barh(place, point.y, 0.62, ends[point.x], color=colour, label=point.series)
                ends[point.x] += point.y
            _categories(axes, cases)

        return _figure(points, draw, x, y, _height(cases, 1))


def _figure(
    points: Sequence[Point], draw: Callable[["Axes", Sequence[Point]], None], x: str, y: str, height: float
) -> str:
    """Draw every panel, `height` inches each, at most three side by side, with one legend below them all."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = grouped(points, lambda point: point.panel)
    num_columns = min(len(panels), MOST_PANELS)
    num_rows = math.ceil(len(panels) / num_columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, num_rows * (height + 0.45) + 0.35), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
        for axes, (title, own) in zip(grid.flat, panels.items(), strict=False):
            draw(axes, own)
            axes.set(title=title, xlabel=x, ylabel=y if axes in grid[:, 0] else "")
            axes.tick_params(labelbottom=True)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        entries = {label: h for a in figure.axes for h, label in zip(*a.get_legend_handles_labels(), strict=True)}
        if len(entries) > 1:
            num_columns = max(1, int(WIDTH * 13 / (max(map(len, entries)) + 6)))
            figure.legend(
                list(entries.values()), list(entries), loc="outside lower center", ncols=min(num_columns, len(entries))
            )
        return _svg(figure)


def _svg(figure: Any) -> str:
    """Return only the SVG element, without XML header and metadata."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    svg = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _reach(point: Point) -> tuple[float, float]:
    """Return how far the point's interval reaches below and above it."""
    low, high = point.interval or (point.y, point.y)
    return max(point.y - low, 0.0), max(high - point.y, 0.0)


def _categories(axes: "Axes", names: Sequence[str]) -> None:
    """Write `names` along the y axis, the first on top."""
    axes.set_yticks(range(len(names)), [textwrap.fill(name, LETTERS) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(False, axis="y")


def _height(names: Sequence[str], share: float) -> float:
    """Return the inches of a panel with a category for each of `names`, `share` times as high as a line of text."""
    lines = max(len(textwrap.wrap(name, LETTERS)) for name in names)
    return 0.75 + max(len(names) * max(0.27 * share, 0.1 + 0.15 * lines), 1.0)


def _scale(axes: "Axes", name: str, points: Sequence[Point], is_log: bool) -> None:
    """Begin axis `name` at zero; or make it logarithmic, with plain numbers, if `is_log` and values lie far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = [value for point in points for value in (point.y, point.floor) if value is not None]
    low, high = min(values), max(*values, *(end for point in points for end in point.interval or ()))
    if is_log and 0 < 4 * low < high:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    elif low >= 0 < high:
        axes.set(**{f"{name}lim": (0, 1.05 * high)})
