"""The bars of shape: they police the tail, where code bases go wrong, more than the mean."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.helpers import ROOT

LIBRARY = sorted((ROOT / "ebrl").rglob("*.py"))
OTHERS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])
BORDERS = {
    "core/errors.py",
    "core/lanes.py",
    "sim/hosts.py",
    "sim/inline.py",
    "sim/child.py",
    "sim/life.py",
    "sim/recovery.py",
    "sim/link.py",
    "cli/doctor.py",
}
PLAIN_BASES = {"Protocol", "Module", "Generic", "Enum", "IntEnum", "StrEnum", "NamedTuple", "TypedDict", "object"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(path: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, kinds))


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]


def length(node: Function | ast.ClassDef) -> int:
    """Return lines without the docstring of the node itself."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def is_property(node: Function) -> bool:
    return any(ast.unparse(decorator).endswith(("property", ".setter")) for decorator in node.decorator_list)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files() -> None:
    long = {relative(path): lines(path) for path in LIBRARY if lines(path) > 450}
    long |= {relative(path): lines(path) for path in OTHERS if lines(path) > 600}
    assert not long
    assert median([lines(path) for path in LIBRARY if lines(path) > 5]) < 180


def test_functions() -> None:
    sizes = {f"{relative(path)}:{f.lineno} {f.name}": length(f) for path in LIBRARY for f in functions(path)}
    assert not {name: size for name, size in sizes.items() if size > 60}
    assert median(sizes.values()) < 9


def test_classes() -> None:
    wrong = []
    for path in LIBRARY:
        for node in classes(path):
            methods = [item for item in node.body if isinstance(item, Function) and not is_property(item)]
            if length(node) > 250 or len(methods) > 15:
                wrong.append(f"{relative(path)}: {node.name} has {length(node)} lines, {len(methods)} methods")
    assert not wrong


def test_inheritance_is_at_most_one_deep() -> None:
    bases: dict[str, list[str]] = {}
    for path in LIBRARY:
        for node in classes(path):
            names = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
            bases[node.name] = [name for name in names if name not in PLAIN_BASES]

    def raises(name: str) -> bool:
        return name.endswith(("Error", "Exception")) or any(map(raises, bases.get(name, [])))

    deep = {name: own for name, own in bases.items() if not raises(name) and any(bases.get(base) for base in own)}
    assert not deep


@pytest.mark.parametrize("path", [*LIBRARY, *OTHERS], ids=relative)
def test_everything_is_annotated(path: Path) -> None:
    for node in functions(path):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra is not None]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not bare, f"{relative(path)}:{node.lineno} {node.name}: {bare}"
        assert node.returns is not None or relative(path).startswith("tests/"), f"{relative(path)}:{node.lineno}"


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_habits(path: Path) -> None:
    where, wrong = path.relative_to(ROOT / "ebrl").as_posix(), []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler) and where not in BORDERS:
            caught = "BaseException" if node.type is None else ast.unparse(node.type)
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if ("BaseException" in caught and not raises) or caught == "Exception":
                wrong.append(f"{node.lineno}: except {caught} outside a border")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("hasattr", "print") and not (called == "print" and where.startswith("cli/")):
                wrong.append(f"{node.lineno}: {called}")
            if called in ("np.random.seed", "random.seed", "torch.manual_seed", "torch.random.manual_seed"):
                wrong.append(f"{node.lineno}: global random numbers")
            if called in ("time.sleep", "asyncio.sleep") and polls(node, path):
                wrong.append(f"{node.lineno}: {called} as a poll")
    ignores = [
        f"{n}: type: ignore without code"
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if "type: ignore" in line and "type: ignore[" not in line
    ]
    assert not wrong + ignores


def polls(call: ast.Call, path: Path) -> bool:
    """Whether a sleep stands in a ``while`` loop, which is how polling looks."""
    return any(
        call.lineno == inner.lineno
        for loop in nodes(path, ast.While)
        for inner in ast.walk(loop)
        if isinstance(inner, ast.Call)
    )


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_import_has_no_side_effects(path: Path) -> None:
    for node in tree(path).body:
        bare = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        assert not bare or relative(path).endswith("__main__.py"), f"{relative(path)}:{node.lineno}: call at import"
