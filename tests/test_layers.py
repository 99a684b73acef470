"""The arrows between the layers, as the code has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, run_python

STAGES = ("sim", "gen", "train")
LIBRARY = sorted((ROOT / "ebrl").rglob("*.py"))
OUTER = ("cli", "cluster")
SIMULATORS = {"metaworld", "mujoco", "libero", "mani_skill", "robosuite", "envpool", "rlinf", "sapien", "dm_control"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT / "ebrl").as_posix()


def imports(path: Path, *, type_checking: bool = True) -> Iterator[str]:
    """Yield the absolute names that a file imports, ``a.b`` for ``from a import b``."""
    stack: list[ast.AST] = [ast.parse(path.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not type_checking:
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))


def packages(path: Path, *, type_checking: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imports(path, type_checking=type_checking)}


def layer(path: Path) -> str:
    """Return ``core``, a stage, ``cli``, ``cluster`` or, for ``ebrl/__init__.py``, the empty string."""
    parts = relative(path).removesuffix(".py").split("/")
    return "" if parts == ["__init__"] else parts[0]


def of(*layers: str) -> list[Path]:
    return [path for path in LIBRARY if layer(path) in layers]


def internal(path: Path) -> set[str]:
    """Return the layers that a file imports; the empty string stands for ``ebrl`` itself."""
    names = [name.split(".") for name in imports(path) if name.split(".")[0] == "ebrl"]
    layers = {name[1] if len(name) > 1 else "" for name in names}
    return {name if name in ("core", *STAGES, *OUTER) else "" for name in layers}


@pytest.mark.parametrize("path", of("core"), ids=relative)
def test_core_imports_only_itself_numpy_and_the_standard_library(path: Path) -> None:
    assert internal(path) <= {"core"}
    heavy = {"torch", "gymnasium", "tyro", "rich", "safetensors", "tensorboardX"}
    heavy |= {"uvloop"} if relative(path) != "core/run.py" else set()  # which goes on where it is missing
    exempt = relative(path) == "core/protocols.py"  # names tensors in annotations
    assert not packages(path, type_checking=not exempt) & heavy


@pytest.mark.parametrize("path", of(*STAGES), ids=relative)
def test_a_stage_imports_core_and_itself_only(path: Path) -> None:
    assert internal(path) <= {"core", layer(path)}


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_nobody_imports_what_is_above(path: Path) -> None:
    assert not packages(path) & {"bench", "tests", "docs"}
    if layer(path) not in OUTER:
        # The package itself may name its outer modules lazily, as strings, never by import.
        assert not internal(path) & set(OUTER)


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_heavy_packages_stay_in_their_layer(path: Path) -> None:
    used, where = packages(path), layer(path)
    if where == "sim":
        assert "torch" not in packages(path, type_checking=False)
    if where not in ("sim", "cli", "cluster"):
        assert "gymnasium" not in used
    if not relative(path).startswith("sim/envs/") and where != "cli":
        assert not used & SIMULATORS


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_only_scopes_make_tasks(path: Path) -> None:
    if relative(path) == "core/scope.py":
        return
    others = {"core/virtual.py": "ensure_future", "core/underway.py": "create_task", "sim/inline.py": "create_task"}
    allowed = {others.get(relative(path))}
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    names |= {name.rsplit(".", 1)[-1] for name in imports(path)}
    assert not names & {"create_task", "ensure_future", "TaskGroup", "run_coroutine_threadsafe"} - allowed


BLOCKER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import importlib, pkgutil
package = importlib.import_module(PACKAGE)
for module in pkgutil.walk_packages(package.__path__, PACKAGE + "."):
    if not module.name.startswith("ebrl.sim.envs."):  # an adapter may import its simulator
        importlib.import_module(module.name)
"""
FRONT = {"gymnasium", "uvloop", "tyro", "rich", "tensorboardX"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("ebrl.core", FRONT | SIMULATORS | {"torch", "safetensors"}),
        ("ebrl.gen", FRONT | SIMULATORS),
        ("ebrl.train", FRONT | SIMULATORS),
        ("ebrl.sim", SIMULATORS | {"torch", "uvloop", "tyro", "rich"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layer_imports_without_what_it_does_not_need(package: str, blocked: set[str]) -> None:
    done = run_python(f"BLOCKED, PACKAGE = {sorted(blocked)!r}, {package!r}\n{BLOCKER}")
    assert done.returncode == 0, done.stderr
