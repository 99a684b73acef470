"""Pictures of what a benchmark found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebrl.core.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """One run: values that hold from their times on."""

    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Picture:
    """Bars to draw.

    Attributes:
        name: Follows the name of the file; empty: the only or the first one.
        groups: Values by name, by label.
        shows: What the values are.
    """

    name: str
    groups: Mapping[str, Mapping[str, float]]
    shows: str


def check_picture(path: str) -> None:
    """See that a picture can be written, before the work that it shows is done.

    Raises:
        ConfigError: matplotlib is not installed, there is no such kind of picture, or no file can be made there.
    """
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in kinds:
        raise ConfigError(f"--plot {path}: its ending must be one of {', '.join(sorted(kinds))}")
    tried = Path(path).with_stem(f"{Path(path).stem}-random-batches")  # no name of several will be longer
    try:
        tried.touch(exist_ok=False)
        tried.unlink()
    except OSError as error:
        raise ConfigError(f"--plot {path}: it cannot be written: {error.strerror}") from error


def bars(picture: Picture, path: str, title: str) -> None:
    """Draw one group of bars per label.

    Args:
        picture: What to draw.
        path: Of the file; its ending says the format.
        title: Above it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    groups = list(picture.groups.items())
    names = list(dict.fromkeys(name for _, values in groups for name in values))
    columns = min(6, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(2.4 * columns, 0.35 * len(names) * rows + 1.6), sharex=True, squeeze=False
    )
    colors = pyplot.get_cmap("tab20")
    for number, axis in enumerate(axes.flat):
        if number >= len(groups):
            axis.set_axis_off()
            continue
        label, values = groups[number]
        for place, name in enumerate(names):
            if name in values:
                axis.barh(place, values[name], color=colors(place % 20))
        axis.set_yticks(range(len(names)), names if number % columns == 0 else [""] * len(names), fontsize=8)
        axis.set_ylim(len(names) - 0.5, -0.5)  # the same in all, whichever of them have a value
        axis.set_title(label, fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(picture.shows, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def over_time(
    panels: Mapping[str, Mapping[str, Sequence[Line]]],
    path: str,
    title: str,
    unit: tuple[str, float],
    y_label: str,
    target: float,
) -> None:
    """Draw, for each panel, the median of the runs of each name over time, and the band of their quartiles.

    A line begins where all of its runs have a value, and ends where the first of them does.

    Args:
        panels: Runs by name, by panel.
        path: Of the picture; its ending says the format.
        title: Above it.
        unit: Of time: its name, and how long it is.
        y_label: Of the values.
        target: A dotted line.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(6.4 * columns, 3.4 * rows + 0.6), squeeze=False)
    colors = pyplot.get_cmap("tab10")
    for axis, (label, runs) in zip(axes.flat, panels.items(), strict=False):
        for place, (name, lines) in enumerate(runs.items()):
            first, last = max(line.times[0] for line in lines), min(line.times[-1] for line in lines)
            grid = np.linspace(first, max(first, last), 400)
            low, middle, high = np.percentile([_held(line, grid) for line in lines], [25, 50, 75], axis=0)
            dot = "." if first >= last else None
            axis.plot(grid / unit[1], middle, color=colors(place), label=name, linewidth=1.6, marker=dot)
            axis.fill_between(grid / unit[1], low, high, color=colors(place), alpha=0.15, linewidth=0)
        axis.set_xlim(left=0.0)
        axis.axhline(target, color="gray", linestyle=":", linewidth=1.0)
        axis.set_title(label, fontsize=11)
        axis.set_xlabel(unit[0])
        axis.set_ylabel(y_label)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    axes.flat[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _held(line: Line, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(line.values)[np.searchsorted(np.asarray(line.times), grid, side="right") - 1]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
