"""Tests of the suite that draw a seed draw it by one strategy, which says why."""

from __future__ import annotations

import ast
from pathlib import Path

import mgpu_check.suite

SUITE = Path(mgpu_check.suite.__path__[0])


def drawn(path: Path) -> dict[str, dict[str, str]]:
    """Return the strategies of each test in a file, with module-level names replaced by their values."""
    tree = ast.parse(path.read_text())
    named = {
        ast.unparse(node.targets[0]): ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)
    }
    found = {}
    for node in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "given":
                given = {one.arg: ast.unparse(one.value) for one in call.keywords}
                found[node.name] = {str(name): named.get(text, text) for name, text in given.items()}
    return found


def test_every_seed_is_drawn_by_the_strategy_that_says_why():
    tests = {
        f"{path.parent.name}::{name}": strategies
        for path in SUITE.glob("*/test_*.py")
        for name, strategies in drawn(path).items()
    }
    assert len(tests) > 150
    seeds = {strategies["seed"] for strategies in tests.values() if "seed" in strategies}
    assert seeds == {"strategies.seeds()", "seeds()", "calls.seeds"}
    listed = [name for name, strategies in tests.items() if set(strategies) <= {"seed", "size", "sizes", "order"}]
    assert len(listed) < 66  # a test draws more than a seed where a smaller example simplifies a failure
