"""How charts look: fonts and lines, and the ticks of axes with names, counts and logarithmic scales."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: Any = {
    "font.family": "DejaVu Sans",  # wide: in the narrower fonts of browsers every text fits too
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",
}


def categories(axes: "Axes", names: Sequence[str]) -> None:
    """Write `names` along the y axis, the first on top."""
    short = [shortened(name) for name in names]
    short = [f"{s} ({short[: i + 1].count(s)})" if short.count(s) > 1 else s for i, s in enumerate(short)]
    axes.set_yticks(range(len(names)), short)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(False, axis="y")


def shortened(name: str, most: int = 44) -> str:
    """Return `name`, its middle left out where it is longer than `most` letters."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def whole_ticks(axes: "Axes", values: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    if all(float(value).is_integer() for value in values):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def log_ticks(axes: "Axes", values: Sequence[float]) -> None:
    """Label the measured places themselves, except those that lie too close to the one before."""
    axes.set_xscale("log", base=2)
    spread = math.log(values[-1] / values[0]) if len(values) > 1 else 0.0
    shown: list[float] = []
    for value in values:
        if not shown or math.log(value / shown[-1]) > max(0.12 * spread, 0.3):
            shown.append(value)
    axes.set_xticks(shown, [f"{v / 1024:g}k" if v >= 1024 and v % 1024 == 0 else f"{v:g}" for v in shown])
    axes.minorticks_off()


def log_scale(axes: "Axes", name: str, values: Sequence[float]) -> None:
    """Give axis `name` plain numbers on a logarithmic scale, or begin at zero where values lie within a factor of 4."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    if not positive or max(positive) < 4 * min(positive):
        axes.set(**{f"{name}lim": (0, None)})
        return
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    decades = math.log10(max(positive) / min(positive))
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
