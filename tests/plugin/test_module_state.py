"""What test files and conftests set on the user's modules reaches the ranks, or a message says that it does not."""

from __future__ import annotations

import textwrap
import traceback
from typing import Any

import pytest

from mgpu_check.plugin.report.failures import hide_engine

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=30")

SCRIPT = """
    class Net:
        dropout = 0.5

    class Config:
        def __init__(self):
            self.lr = 1.0
            self.nested = {"deep": {}}

    config, table, layers, untouched = Config(), {"a": 1}, [1], 0

    def state():
        return options, added, named, config.lr, Net.dropout, table, layers, untouched

    def configure():
        global untouched
        untouched += 1  # not from a test file: ranks run the function themselves if they need it

    if __name__ == "__main__":
        options = {"scale": 2.0}
"""

LATE = """
    from script import options  # of the main block

    def late():
        return options
"""

CONFTEST = """
    import pytest
    import script

    script.options = {"scale": 0.0}  # the test file sets it again

    def pytest_configure():
        script.table["hook"] = 2

    @pytest.fixture(autouse=True)
    def setting():
        script.named = "by a fixture"
        script.layers.append(7)
        yield
        script.layers.pop()
        del script.named
"""

TESTS = """
    import argparse
    import pytest
    import script
    from script import table

    def set_all(**values):
        for name, value in values.items():
            setattr(script, name, value)

    script.options = argparse.Namespace(scale=2.0)
    import late
    set_all(added=lambda: 5)
    script.config.lr = 3.0
    script.config.nested["deep"]["deeper"] = 1
    script.Net.dropout = 0.0
    table.update(b=3)
    script.configure()

    @pytest.mark.ranks(2)
    def test_rank(rank):
        options, added, *rest = script.state()
        assert (options.scale, added()) == (2.0, 5)
        assert rest == ["by a fixture", 3.0, 0.0, {"a": 1, "b": 3, "hook": 2}, [1, 7], 0]
        assert late.late() is script.options

    def test_run(ranks):
        assert ranks.run(lambda: script.options.scale) == [2.0] * 2
        script.options = "in the body"
        assert ranks.run(lambda: script.options) == ["in the body"] * 2
        assert ranks.run(lambda: hasattr(script, "named")) == [True] * 2

    def test_monkeypatch(ranks, monkeypatch):
        monkeypatch.setattr(script, "options", "replaced")
        assert ranks.run(lambda: script.options) == ["replaced"] * 2
        monkeypatch.undo()
        del script.added
        assert ranks.run(lambda: (script.options, hasattr(script, "added"))) == [("in the body", False)] * 2

    def test_gpus(gpus):
        assert script.config.lr == 3.0 and script.config.nested == {"deep": {"deeper": 1}}

    def test_ranks_keep_what_they_set(ranks):
        def setup(rank):
            script.untouched = script.Net.width = 7

        ranks.run(setup)
        assert ranks.run(lambda: (script.untouched, script.Net.width)) == [(7, 7)] * 2
"""


@pytest.mark.parametrize("mode", [pytest.param("prepend", marks=pytest.mark.slow), "importlib"])
def test_ranks_have_what_test_files_set(run, pytester, mode):
    pytester.makepyfile(script=SCRIPT, late=LATE, test_it=TESTS)
    pytester.makeconftest(CONFTEST)
    run(*GPUS, f"--import-mode={mode}", "-opythonpath=.").assert_outcomes(passed=5)


BESIDE = """
    import pytest
    from checks import helper

    helper.scale = 2

    @pytest.mark.ranks(2)
    def test_it(rank):
        assert helper.scaled(rank.index) == 2 * rank.index
"""


IN_PACKAGE = """
    import pytest
    from . import nets
    from .nets import net

    @pytest.mark.ranks(2)
    def test_in_package(rank):
        assert isinstance(net(), nets.Net)

    def test_in_parent(ranks):
        assert ranks.run(nets.net, size=1)[0].weight.shape == (3, 2)
"""


def test_modules_beside_tests_that_ranks_cannot_import(pytester, run):
    """As with the command pytest, which does not put its directory on the path."""
    directory = pytester.mkdir("checks")
    (directory / "helper.py").write_text("scale = 1\ndef scaled(value): return scale * value\n")
    (directory / "test_it.py").write_text(textwrap.dedent(BESIDE))
    package = pytester.mkpydir("package")
    (package / "nets.py").write_text("import torch\nclass Net(torch.nn.Linear): pass\ndef net(): return Net(2, 3)\n")
    (package / "test_package.py").write_text(textwrap.dedent(IN_PACKAGE))
    pytester.makeconftest("import sys; sys.path[:] = [path for path in sys.path if path not in ('', sys.path[0])]")
    run(*GPUS, "--import-mode=importlib").assert_outcomes(passed=3)


UNSENDABLE = """
    import pytest, threading
    import script
    from mgpu_check import assert_step_scales

    script.options = threading.Lock()

    def step(model, batch, rank):
        script.state()

    @pytest.mark.ranks(2)
    def test_it(rank):
        script.state()

    @pytest.mark.ranks(2)
    def test_another_variable(rank):
        script.nothing

    @pytest.mark.ranks(2)
    def test_without(rank):
        assert script.untouched == 0
"""
SENTENCE = (
    "script.options is set in the pytest process only, because its value cannot be pickled: cannot pickle "
    "'_thread.lock' object; set it in the function that runs on the ranks, such as build or step"
)


def test_a_variable_that_cannot_be_sent_is_named(run, pytester):
    pytester.makepyfile(script=SCRIPT, test_it=UNSENDABLE)
    result = run(*GPUS)
    result.assert_outcomes(passed=1, failed=2, warnings=3)
    text = result.stdout.str()
    assert f"PytestWarning: {SENTENCE}" in text
    assert text.count(f"E       {SENTENCE}") == 1, text  # in the error about this variable, and in no other


FAILING = """
    import script, torch
    from mgpu_check import assert_step_scales

    def build(): return torch.nn.Linear(1, 1)
    def batch(n): return torch.ones(n, 1)
    def step(model, batch, rank): script.state()

    def test_it(ranks):
        assert_step_scales(ranks, step, build=build, batch=batch, max_examples=1)
"""


@pytest.mark.slow
def test_tracebacks_have_the_frames_of_the_user(run, pytester):
    pytester.makepyfile(script=SCRIPT, test_it=FAILING)
    shown = run(*GPUS)
    lines = ["E * step fails on one device: rank 0 of 1 raised NameError*", 'E *script.py", line *, in state']
    shown.stdout.fnmatch_lines(lines)
    shown.stdout.no_fnmatch_line("*/mgpu_check/*")
    run(*GPUS, "--full-trace").stdout.fnmatch_lines(["*/mgpu_check/gates/search/trials.py:*"])


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_a_defect_of_the_engine_keeps_its_frames(error):
    code = compile("def fail(error): raise error", "/site-packages/mgpu_check/engine/pool.py", "exec")
    module: dict[str, Any] = {}
    exec(code, module)
    try:
        module["fail"](error())
    except error as raised:
        hide_engine(raised)
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(raised.__traceback__)]
    assert frames[1:] == ([] if error is ValueError else ["fail"])
