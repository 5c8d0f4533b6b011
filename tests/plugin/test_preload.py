"""Of the packaged suite, the fork server of a simulated node imports what ranks would import one after the other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mgpu_check.suite
from mgpu_check.applications import used_by_ranks

SUITE = Path(mgpu_check.suite.__path__[0])


def check(file: str, package: str = "mgpu_check.suite"):
    """A test of the package, as far as its modules are looked up."""
    path = SUITE / file
    name = ".".join((package, *path.relative_to(SUITE).with_suffix("").parts))
    return SimpleNamespace(path=path, module=SimpleNamespace(__name__=name))


def test_the_modules_are_those_of_the_properties_that_run():
    found = used_by_ranks([check("sharded/test_sharded.py"), check("devices/test_devices.py")])
    assert {"mgpu_check.suite.sharded.dtensors", "mgpu_check.suite.devices.checks"} <= set(found)
    assert {name.split(".")[2] for name in found} == {"sharded", "devices"}
    assert not [name for name in found if ".faults" in name or "test_" in name]
    assert used_by_ranks([check("sharded/test_sharded.py", package="their.suite")]) == []


def test_a_file_that_needs_ranks_starts_the_fork_server_before_its_import(run, pytester):
    pytester.makepyfile(
        conftest="""
            import gc
            from mgpu_check.plugin.stash import SESSION

            def pytest_make_collect_report(collector):
                pool = collector.config.stash[SESSION]._pool
                started = pool is not None and pool._launcher._server is not None
                print("start", collector.name, started, started and pool._launcher._more, gc.isenabled())

            def pytest_sessionfinish():
                print("finish", gc.isenabled())
        """,
        test_a="def test_a(): pass",
        test_b="def test_b(ranks): pass",
        test_c="def test_c(ranks): assert_step_scales",
    )
    text = run("--gpus=2", "--simulate", "-s", "--collect-only").stdout.str()
    assert text.count(".py False False True") == 3
    text = run("--gpus=2", "--simulate", "-s", "-k", "test_a").stdout.str()
    assert "start test_a.py False False False" in text and "start test_b.py True () False" in text
    assert "finish True" in text
    text = run("--gpus=2", "--simulate", "-s", "test_c.py", "-k", "nothing").stdout.str()
    assert "start test_c.py True ('mgpu_check.gates.run.measurement', 'mgpu_check.gates.run.step_runs') False" in text
