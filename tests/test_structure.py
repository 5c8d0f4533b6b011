"""The shape of the project: which package may import which, and what importing costs."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import mgpu_check
from mgpu_check.suite.common.faults.registry import PROPERTIES

HERE = Path(__file__).parent
PACKAGE = Path(mgpu_check.__file__).parent

# The layers, from the lowest up. A package may import those in lower layers, and itself; never one in its own layer.
LAYERS = [
    {"annotations", "applications", "errors", "option_values", "pages", "small_models", "version"},
    {"devices", "processes", "settings"},
    {"torch_hooks"},
    {"numerics", "simulated"},
    {"diagnosis", "engine"},
    {"asserts"},
    {"oracles"},
    {"gates", "plugin", "strategies"},
    {"acceptance", "compare", "integrations", "models", "suite"},
    {"cli"},
]
LOOSE = {"__init__", "__main__"} | {
    "annotations",
    "applications",
    "errors",
    "option_values",
    "pages",
    "settings",
    "small_models",
    "strategies",
    "version",
}


@functools.cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in statements(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a block, also those within others; `ast.walk` goes through their expressions, too."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(block, field, ()):
            yield node
            yield from statements(node)


@functools.cache
def packages_and_imports() -> list[tuple[str, str, str]]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for node in imports_of(path):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == "mgpu_check":
                    names = [f"mgpu_check.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                found.append((parts[0], "/".join(parts), name))
    return found


def layer(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def test_imports_point_down():
    wrong = []
    for package, path, name in packages_and_imports():
        if not name.startswith("mgpu_check.") or package == "__main__":
            continue
        other = name.split(".")[1]
        if other in mgpu_check.__all__ or other == "strategies":
            continue  # a public name, wherever it is at home
        if other != package and layer(other) >= layer(package):
            wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_the_layers_are_as_the_page_says():
    """Layers and tree have the same packages, no more than 17, and the page on architecture lists each of them."""
    directories = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert set.union(*LAYERS) | LOOSE == directories | files
    assert files == LOOSE
    assert len(directories) <= 17
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    plan = page[page.index("## Packages and layers") : page.index("## The engine")]
    assert {package for package in set.union(*LAYERS) if not re.search(rf"\b{package}\b", plan)} == set()


CORE = set.union(*LAYERS[:8]) | {"__init__"}


@functools.cache
def used_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, also those that it imports from their package by name."""
    found = set()
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("mgpu_check."):
            for alias in node.names:
                module = f"{node.module}.{alias.name}".split(".")[1:]
                is_module = PACKAGE.joinpath(*module).is_dir() or PACKAGE.joinpath(*module).with_suffix(".py").exists()
                found.add(".".join(module if is_module else module[:-1]))
    return found


def test_the_suite_and_the_acceptance_use_what_the_page_says_of_the_core():
    page = (HERE.parent / "docs" / "architecture.md").read_text()
    table = page[page.index("### What the suite and the acceptance use") : page.index("### The way of a test")]
    rows = dict(re.findall(r"^\| `?([a-z_ ]+)`? \| (.*) \|$", table, re.MULTILINE))
    allowed = {"asserts", "oracles"}
    for package, names in rows.items():
        prefix = "" if package == "top level" else f"{package}."
        allowed |= {prefix + name for name in re.findall(r"`([a-z_.]+)`", names)}
    used = {
        module
        for package in ("suite", "acceptance")
        for path in PACKAGE.joinpath(package).rglob("*.py")
        for module in used_modules(path)
        if module.partition(".")[0] in CORE
    }
    used = {"simulated.simulated_node" if module == "simulated" else module for module in used}
    assert {module for module in used if not within(module, allowed)} == set()
    assert {module for module in allowed if not any(within(one, {module}) for one in used)} == set()


def within(module: str, packages: set[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def test_each_property_has_a_folder_of_its_own():
    """It has the tests and the faults of the property, and imports no other property."""
    folders = {path.parent.name for path in PACKAGE.glob("suite/*/test_*.py")}
    assert folders == set(PROPERTIES)
    for name in folders:
        folder = PACKAGE / "suite" / name
        assert [path.stem for path in folder.glob("test_*.py")] == [f"test_{name}"]
        assert folder.joinpath("faults.py").exists() or folder.joinpath("faults", "__init__.py").exists()
        own = set().union(*map(used_modules, folder.rglob("*.py")))
        others = {module for module in own if module.startswith("suite.")}
        strangers = {module for module in others if module.split(".")[1] not in {name, "common", "recipes"}}
        assert strangers == set(), name


def test_the_acceptance_uses_no_tests_and_no_faults_of_the_suite():
    used = set().union(*map(used_modules, PACKAGE.joinpath("acceptance").rglob("*.py")))
    wrong = [module for module in used if re.match(r"suite\..*\b(test_\w+|faults)\b", module)]
    assert wrong == []


RANKS = {"processes", "simulated", "torch_hooks", "engine", "asserts"}


@pytest.mark.parametrize(
    ("packages", "unknown"),
    [
        (RANKS | {"errors", "settings", "devices", "numerics", "diagnosis"}, {"pytest", "_pytest"}),
        (RANKS, {"hypothesis"}),
    ],
    ids=["pytest", "hypothesis"],
)
def test_the_lower_packages_know_nothing_of(packages, unknown):
    imports = packages_and_imports()
    assert [path for r, path, name in imports if r in packages and name.split(".")[0] in unknown] == []


def first_to_import(unwanted: str, *modules: str) -> str:
    """Import `modules` one after the other, and return the first that imports `unwanted`; "" if none does."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    if sys.argv[1] in sys.modules:\n"
        "        print(name)\n"
        "        break\n"
    )
    command = [sys.executable, "-c", code, unwanted, *modules]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def imported_by_tests_of_ranks(path: Path) -> set[str]:
    """The modules that tests of the suite import in their bodies, where these run in the pytest process and call
    ranks."""
    bodies = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and {argument.arg for argument in node.args.args} & {"ranks", "gpus", "rank"} == {"ranks"}
    ]
    imports = [node for body in bodies for node in ast.walk(body) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in imports if node.module}


def test_the_pytest_process_does_without_torch():
    suite = sorted(PACKAGE.glob("suite/*/test_*.py"))
    called = set().union(*map(imported_by_tests_of_ranks, suite))
    assert "mgpu_check.suite.devices.seeded_ranks" in called  # or nothing is found
    modules = (
        "mgpu_check",
        "mgpu_check.plugin.plugin",
        "mgpu_check.plugin.execution",
        "mgpu_check.plugin.session",
        "mgpu_check.engine.pool",
        "mgpu_check.strategies",
        "mgpu_check.diagnosis.rules.order",  # the report in Markdown names mistakes
        *(f"mgpu_check.suite.{path.parent.name}.{path.stem}" for path in suite),
        *sorted(called),
    )
    assert first_to_import("torch", *modules) == ""


def test_the_plugin_does_without_hypothesis():
    assert first_to_import("hypothesis", "mgpu_check", "mgpu_check.plugin.plugin") == ""


def test_real_ranks_do_without_the_simulator():
    modules = ("mgpu_check.engine.rank_side.worker", "mgpu_check.numerics.perturbation")
    assert first_to_import("mgpu_check.simulated", *modules) == ""


def test_every_public_name_exists_and_has_a_docstring():
    for name in mgpu_check.__all__:
        assert getattr(mgpu_check, name).__doc__, name


@pytest.mark.parametrize(("top", "most"), [(PACKAGE, 900), (HERE, 500)], ids=["package", "tests"])
def test_files_can_be_read_in_one_sitting(top, most):
    """Of tests for a second reason: workers of pytest-xdist take whole modules, and the last one ends the run."""
    lengths = {str(path.relative_to(top)): len(path.read_text().splitlines()) for path in top.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > most} == {}


def test_the_first_conftest_imports_nothing_of_the_tests():
    """Runs of the packaged suite in this repository read it too, and find no package `tests` on their path."""
    imports = [
        node
        for node in ast.parse(Path(__file__).with_name("conftest.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
    ]
    assert imports and not [node.module for node in imports if str(node.module).partition(".")[0] == "tests"]


def test_what_stands_beside_the_package_imports_what_it_has():
    """Benchmarks and examples, which no other test imports."""
    missing = []
    for path in (path for name in ("benchmarks", "examples") for path in (HERE.parent / name).rglob("*.py")):
        for node in imports_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mgpu_check":
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    submodule = hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}")
                    if not hasattr(module, alias.name) and not submodule:
                        missing.append(f"{path.name}: {node.module}.{alias.name}")
    assert not missing


LIMITS = {"mgpu_check": (400, 101_000), "tests": (340, 48_000)}
"""Files and lines of Python. A change that needs more removes something first, or gives its reason here.

The package had 391 files and 99,400 lines before the arithmetic of GPUs, `assert_bitwise`, `assert_survives` and narrow
formats. These took 8 files and 2,700 lines, and 1,200 lines elsewhere left for them.
"""


@pytest.mark.parametrize("top", LIMITS)
def test_the_house_does_not_grow(top):
    texts = [path.read_text() for path in HERE.parent.joinpath(top).rglob("*.py")]
    files, lines = LIMITS[top]
    assert len(texts) <= files
    assert sum(text.count("\n") for text in texts) <= lines
