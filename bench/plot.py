"""Pictures of what a benchmark found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebrl.core.errors import ConfigError


def bars(groups: Sequence[tuple[str, dict[str, float]]], path: str, title: str) -> None:
    """Draw one group of bars per label.

    Args:
        groups: Labels, and values by name.
        path: Of the picture; its ending says the format.
        title: Above it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for _, values in groups for name in values))
    columns = 6
    rows = math.ceil(len(groups) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(2.4 * columns, 0.35 * len(names) * rows + 1.6), sharex=True, squeeze=False
    )
    colors = pyplot.get_cmap("tab10")
    for number, axis in enumerate(axes.flat):
        if number >= len(groups):
            axis.set_axis_off()
            continue
        label, values = groups[number]
        for place, name in enumerate(names):
            if name in values:
                axis.barh(place, values[name], color=colors(place % 10))
        axis.set_yticks(range(len(names)), names if number % columns == 0 else [""] * len(names), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(label, fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
