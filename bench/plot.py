"""Pictures of what a benchmark found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebrl.core.errors import ConfigError


def check_picture(path: str) -> None:
    """See that a picture can be written, before the work that it shows is done.

    Raises:
        ConfigError: matplotlib is not installed, there is no such folder, or no such kind of picture.
    """
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in kinds:
        raise ConfigError(f"--plot {path}: its ending must be one of {', '.join(sorted(kinds))}")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).parent}")


def bars(groups: Sequence[tuple[str, dict[str, float]]], path: str, title: str, x_label: str) -> None:
    """Draw one group of bars per label.

    Args:
        groups: Labels, and values by name.
        path: Of the picture; its ending says the format.
        title: Above it.
        x_label: What the values are.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    names = list(dict.fromkeys(name for _, values in groups for name in values))
    columns = 6
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
        axis.invert_yaxis()
        axis.set_title(label, fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(x_label, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
