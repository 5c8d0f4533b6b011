"""Every option of every command, with no value, an empty one, twice, at the end, and after ``--``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.__main__ import main
from mgpu_check.cli import accept, compare, record, selftest, simulate, suite
from mgpu_check.plugin.report.replay import CommandLine
from mgpu_check.settings import OPTIONS, resolve

COMMANDS: dict[tuple[str, ...], Any] = {(): suite, ("accept",): accept, ("selftest",): selftest}
NODE = ("--gpus=2", "--simulate")
SHORT = {f"--accept-{flag.removeprefix('--')}": flag for flag in accept._OURS}


def parsed(arguments: Sequence[str], plugins: Sequence[Any], *_: Any) -> int:
    """Stand for pytest: read the options as it does, and run nothing."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in OPTIONS.values():
        parser.add_argument(option.flag, dest=option.name, **option.command_line)
    parser.add_argument("-k")
    line = next((one for one in plugins if isinstance(one, CommandLine)), None)
    try:
        given, _rest = parser.parse_known_args(list(arguments))
        resolve({name: getattr(given, name) for name in OPTIONS}, {}, {}, line.origin_of if line else str)
    except SystemExit:
        return 4
    except ValueError as error:
        print(error)
        return 4
    return 0


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in COMMANDS.values():
        monkeypatch.setattr(module, "run", parsed)
    monkeypatch.setattr(selftest.Selftest, "print_verdict", lambda _: True)
    for name in [name for name in os.environ if name.startswith(("MGPU_CHECK_", "PYTEST_ADDOPTS"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def forms(flag: str) -> Iterator[tuple[str, ...]]:
    for before in ((), NODE):
        yield (*before, flag)
        yield (*before, f"{flag}=")
        yield (*before, flag, "")
    yield (*NODE, flag, flag)
    yield (*NODE, flag, "-k", "memory")
    yield (*NODE, flag, "--", "x")
    yield (*NODE, "--", flag)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0] if words else "suite")
def test_an_option_without_its_value_is_named_with_a_remedy(
    words: tuple[str, ...], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    option = OPTIONS[name]
    flag = SHORT.get(option.flag, option.flag) if words == ("accept",) else option.flag
    valued = "metavar" in option.command_line and "nargs" not in option.command_line
    for form in forms(flag):
        code = main([*words, *form])
        output = "".join(capfd.readouterr())
        assert code in (0, 4) and "Traceback" not in output, form
        after = "--" in form and form.index("--") < form.index(flag) if flag in form else False
        wrong = valued or (form[-1] == f"{flag}=" and "metavar" not in option.command_line)
        if wrong and not after:
            assert code == 4 and flag in output, form
            assert any(word in output for word in ("give", "needs a value", "choose")), (form, output)


PARSERS: dict[tuple[str, ...], Callable[[], argparse.ArgumentParser]] = {
    ("compare",): compare._parser,
    ("record",): record._parser,
    ("simulate",): simulate._parser,
    ("accept", "merge"): accept._merge_parser,
}


@pytest.mark.parametrize("words", PARSERS, ids="-".join)
def test_each_option_of_a_parser_names_its_value(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    Path("script.py").touch()
    for action in PARSERS[words]()._actions:
        if action.dest == "help" or not action.option_strings:
            continue
        (flag,) = action.option_strings
        for form in [(flag,), (f"{flag}=", "script.py"), (f"{flag}=", "--", "script.py"), ("--", flag), (flag, flag)]:
            code = main([*words, *form])
            output = "".join(capfd.readouterr())
            assert code == 4 and "Traceback" not in output, form
            if form[0].startswith(flag) and action.nargs is None:
                assert f"argument {flag}: " in output, form
                assert "give" in output or f"needs a value: {flag}={action.metavar}" in output, (form, output)


def test_an_empty_file_is_not_the_current_directory(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "merge", ""]) == 4
    assert "'' is empty; give " in "".join(capfd.readouterr())


@pytest.mark.parametrize("words", [("devices",), *PARSERS], ids="-".join)
def test_what_a_parser_does_not_know_is_exit_code_4(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--no-such-option"]) == 4
    assert main([*words, "-h"]) == 0
    assert "Traceback" not in "".join(capfd.readouterr())
