"""A run that is forked from the template is to itself, and to its test, as one that an interpreter was started for."""

from __future__ import annotations

import json
import os
import signal

import pytest

FACTS = """
    import json, os, signal, sys, warnings
    import pytest

    def facts():
        with open("/proc/self/environ") as file:
            told = sorted(entry for entry in file.read().split("\\0") if entry)
        return {
            "argv": sys.argv[1:],
            "program": os.path.basename(sys.argv[0]),
            "main": sys.modules["__main__"].__spec__.name,
            "path": sys.path,
            "environ": dict(os.environ),
            "told": told,
            "directory": os.getcwd(),
            "input": sys.__stdin__.read(),
            "terminal": [os.isatty(number) for number in range(3)],
            "open": len(os.listdir("/proc/self/fd")),
            "signals": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
            "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "umask": os.umask(0o022),
            "filters": len(warnings.filters),
            "hypothesis": "hypothesis" in sys.modules,
            "plugin": sorted(name for name in sys.modules if name.startswith("mgpu_check")),
            "of hypothesis": of_hypothesis(),
        }

    def of_hypothesis():
        # After all else: this imports it.
        import hypothesis
        from hypothesis import strategies

        assert hypothesis.__spec__.origin == hypothesis.__file__ and hypothesis.strategies is strategies
        names = sorted(name for name in sys.modules if name.startswith("hypothesis"))
        return names, hypothesis.settings.get_current_profile_name(), hypothesis.settings.default.max_examples

    def test_it(capfd):
        with capfd.disabled():
            with open("facts.json", "w") as file:
                json.dump(facts(), file)

    def test_output():
        os.write(2, b"to stderr")
        assert os.environ["A_VARIABLE"] == "text"
        assert not "red"
"""


@pytest.mark.slow
def test_what_a_forked_run_finds(pytester, warm, template, monkeypatch):
    pytester.makepyfile(test_it=FACTS)
    monkeypatch.setenv("A_VARIABLE", "text")
    found = []
    for cold in (False, True):
        environment = {**os.environ, "PYTHONPATH": str(pytester.path)}
        if cold:
            monkeypatch.setattr(template, "fits", lambda *_: False)
        assert template.fits(pytester._getpytestargs(), environment) is not cold
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--basetemp=tmp", "-p", "no:faulthandler")
        result.assert_outcomes(passed=1, failed=1)
        found.append(json.loads(pytester.path.joinpath("facts.json").read_text()))
        found[-1]["lines"] = [line for line in result.outlines if " in " not in line]
        found[-1]["argv"] = [word for word in found[-1]["argv"] if not word.startswith("--basetemp=")]
    forked, started = found
    forked["open"] -= 1  # the socket of its standby
    assert set(started.pop("plugin")) <= set(forked["plugin"])
    assert {name: forked[name] for name in started} == started


def test_a_run_that_imports_in_another_way_gets_an_interpreter_of_its_own(pytester, template, monkeypatch):
    command = pytester._getpytestargs()
    assert template.fits(command, os.environ)
    assert template.fits(command, {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "what a test has left that compiles"})
    assert not template.fits(("pytest",), os.environ)
    for name in ("PYTHONWARNINGS", "TORCH_LOGS", "OMP_NUM_THREADS"):
        assert not template.fits(command, {**os.environ, name: "3"})


def test_how_a_forked_run_ends(pytester, warm):
    pytester.makepyfile(
        """
        import atexit, os, threading, pytest
        from pathlib import Path

        def test_late():
            atexit.register(Path("at-exit").touch)
            threading.Timer(0.1, Path("thread").touch).start()

        def test_killed():
            os.kill(os.getpid(), 9)

        def test_aborts():
            pytest.exit("enough", returncode=77)
        """
    )
    assert pytester.runpytest_subprocess("-k", "late").ret == pytest.ExitCode.OK
    assert pytester.path.joinpath("at-exit").exists() and pytester.path.joinpath("thread").exists()
    assert pytester.runpytest_subprocess("-k", "killed").ret == -signal.SIGKILL
    assert pytester.runpytest_subprocess("-k", "aborts").ret == 77
    assert pytester.runpytest_subprocess("--no-such-option").ret == pytest.ExitCode.USAGE_ERROR
