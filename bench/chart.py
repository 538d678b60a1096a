"""Draws README's chart of tokens per second from a result file of `specdec bench peers`.

python bench/chart.py bench/results/peers_8b_nvidia-h200_2026-11-22.json --out docs/speed.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

BARS = {  # `what` of a row -> its label
    "generate": "transformers generate",
    "generate, static cache": "generate, static cache, compiled",
    "specdec, no draft": "specdec without a draft",
    "specdec, eagle3": "specdec + EAGLE-3",
}
GREY, BLUE, DARK = "#b8bec8", "#2f6fde", "#24292f"


def main() -> None:
    """Read the arguments and write the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a JSON file that `specdec bench peers` wrote")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    arguments = parser.parse_args()
    matplotlib.rcParams.update({"svg.hashsalt": "specdec", "font.family": "DejaVu Sans", "font.size": 10})
    figure = chart(json.loads(arguments.result.read_text("utf-8")))
    figure.savefig(arguments.out, format="svg", metadata={"Date": None})  # equal input gives an equal file


def chart(result: dict) -> Figure:
    """Return horizontal bars of tokens/s, a bar for each way of BARS."""
    rows = {row["what"]: row for row in result["rows"]}
    speeds = [rows[what]["tokens_per_s"] for what in BARS]
    figure, axes = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
    axes.barh(list(BARS.values()), speeds, color=[BLUE if "specdec" in what else GREY for what in BARS], height=0.68)
    for place, speed in enumerate(speeds):
        text = f" {speed:,.0f}  ({speed / speeds[0]:.1f}x)"
        axes.text(speed, place, text, va="center", color=DARK, fontweight="bold" if place == len(speeds) - 1 else None)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(speeds))
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    figure.suptitle(_title(rows["specdec, eagle3"], result["gpu"]), fontsize=10, x=0.01, ha="left", color=DARK)
    return figure


def _title(row: dict, gpu: str) -> str:
    model = {"8b": "Llama-3.1-8B shape"}.get(row["shape"], row["shape"])
    device = gpu.removeprefix("nvidia-").upper()
    return f"Tokens per second: {model}, {row['requests']} requests, {row['new_tokens']} new tokens each, one {device}"


if __name__ == "__main__":
    main()
