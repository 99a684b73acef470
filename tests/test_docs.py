"""Examples in README and docstrings run.

A block of README.md is run with the names that earlier blocks defined. HTML comments before a block change that:

``<!-- test: skip because REASON -->``           not run
``<!-- test: replace OLD with NEW -->``          run with smaller numbers (may be repeated)
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import ebrl
from tests.helpers import ROOT

BLOCK = re.compile(r"((?:<!-- test: .*? -->\s*)*)```python\n(.*?)```", re.DOTALL)
SKIP = re.compile(r"<!-- test: skip because (.{8,}?) -->")
REPLACE = re.compile(r"<!-- test: replace `(.+?)` with `(.*?)` -->")
DOCUMENTS = ["README.md"]
NEEDS_A_SIMULATOR = "ebrl.sim.envs."


def blocks(document: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer((ROOT / document).read_text())]


@pytest.mark.slow
@pytest.mark.sims
@pytest.mark.timeout(120)
@pytest.mark.blocks("env_spec builds an instance, before anything runs")
@pytest.mark.hogs("examples import what they use where they use it")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_run(document: str) -> None:
    found = blocks(document)
    assert found, f"{document} has no python block"
    namespace: dict[str, Any] = {"__name__": "readme"}
    for comments, code in found:
        assert comments.count("<!--") == len(SKIP.findall(comments)) + len(REPLACE.findall(comments)), comments
        if SKIP.search(comments):
            continue
        for old, new in REPLACE.findall(comments):
            assert old in code, f"{document}: nothing to replace: {old}"
            code = code.replace(old, new)
        exec(compile(code, document, "exec"), namespace)


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(ebrl.__path__, "ebrl.")]
    return [name for name in names if not name.startswith(NEEDS_A_SIMULATOR) and not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_documents_exist() -> None:
    for document in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs/design.md"):
        assert Path(ROOT, document).stat().st_size > 500, document
