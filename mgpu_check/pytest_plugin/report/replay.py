"""The shell line that repeats a failure."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.engine.remote import current
from mgpu_check.settings import OPTIONS

__all__ = ["BLOB", "FLAG", "CommandLine", "Invocation", "lines_for", "parts_of", "take_blobs"]

FLAG = "--gpu-replay"

BLOB = "_mgpu_check_blob"
"""Attribute by which an exception names the Hypothesis example that raised it."""

_PACKAGED = {"mgpu_check.suite": (), "mgpu_check.acceptance": ("accept",)}
"""Packages of tests, with the words by which `mgpu-check` runs them."""

_OURS = frozenset({FLAG, *(option.flag for option in OPTIONS.values())})

# Options that select tests, stop early, run in parallel, measure or show: one test fails without them as it did with
# them. What is not listed here is kept, because options of a repository's own decide what its tests do.
_DROPPED = frozenset(
    """
    --lf --last-failed --ff --failed-first --nf --new-first --lfnf --last-failed-no-failures --cache-show --cache-clear
    --sw --stepwise --sw-skip --stepwise-skip --sw-reset --stepwise-reset --deselect --ignore --ignore-glob --pyargs
    --keep-duplicates --collect-only --co --exitfirst --maxfail --quiet --verbose --verbosity --tb --show-capture --color
    --code-highlight --no-header --no-summary --no-fold-skipped --durations --durations-min --showlocals --no-showlocals
    --full-trace --force-short-summary --fold-skipped --xfail-tb --disable-warnings --disable-pytest-warnings --pastebin
    --junitxml --junit-xml --junitprefix --junit-prefix --report-log --html --self-contained-html --setup-show --capture
    --basetemp --numprocesses --maxprocesses --max-worker-restart --dist --tx --px --rsyncdir --rsyncignore --looponfail
    --testrunuid --maxschedchunk --loadscope-reorder --no-loadscope-reorder --cov --cov-reset --cov-report --cov-config
    --no-cov --no-cov-on-fail --cov-fail-under --cov-append --cov-branch --cov-context --cov-precision --reruns
    --reruns-delay --only-rerun --rerun-except --pdb --pdbcls --trace --hypothesis-seed --hypothesis-verbosity
    --hypothesis-explain --hypothesis-show-statistics
    """.split()  # noqa: SIM905  # a list would be four times as long
)
_SWITCHES = "xvqslhdf"  # short options without a value, none of which is needed
_DROPPED_LETTERS = "kmnr"  # short options with one
_IRRELEVANT_PLUGINS = ("no:cacheprovider", "no:terminal", "no:progress", "mgpu_check")

_NOTE = re.compile(r"@reproduce_failure\('(?P<version>[^']+)', (?P<blob>b'[^']*'|b\"[^\"]*\")\)")


@dataclass(frozen=True)
class CommandLine:
    """A plugin of the `mgpu-check` command: what the user typed, where pytest sees more.

    Attributes:
        words: such as ("mgpu-check",) or ("mgpu-check", "selftest"), the program's name left open.
        arguments: what follows them, as pytest has them.
        omits: the prefix that options of the plugin lack in this command: "--accept-" for ``--report`` in place of
            ``--accept-report``.
        added: options that the command has added to what the user typed.
    """

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    omits: str = ""
    added: frozenset[str] = frozenset()

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.prog = " ".join(("mgpu-check", *self.words))

    def origin_of(self, flag: str) -> str:
        """Return where the value of an option on the command line comes from, in the user's words."""
        return f"default of {' '.join(('mgpu-check', *self.words))}" if flag in self.added else self.as_typed(flag)

    def as_typed(self, word: str) -> str:
        """Return a word of `arguments` as users write it."""
        return f"--{word.removeprefix(self.omits)}" if self.omits and word.startswith(self.omits) else word


@dataclass(frozen=True)
class Invocation:
    """The command line of this run, as far as it matters for one of its tests. Plain data, for xdist's workers.

    Attributes:
        directory: where it was called.
        program: the shell words before the options, such as ("python", "-m", "pytest").
        suite_program: those for a check of the packaged suite.
        options: of mgpu-check, by its settings.
        suite_options: the same with those that stand in an ini file, of which the packaged suite has another.
        kept: other options that this run was called with.
        seed: of Hypothesis, as given on the command line.
    """

    directory: str
    program: tuple[str, ...]
    suite_program: tuple[str, ...]
    options: tuple[str, ...]
    suite_options: tuple[str, ...]
    kept: tuple[str, ...]
    seed: str | None

    @classmethod
    def of(cls, config: pytest.Config) -> Invocation:
        """Return the command line of this process."""
        command = next((p for p in config.pluginmanager.get_plugins() if isinstance(p, CommandLine)), None)
        arguments = command.arguments if command else [os.fspath(a) for a in config.invocation_params.args]
        driver = current.driver()
        ours = _program("mgpu_check", "mgpu-check") if driver is None else driver.command
        program = (*ours, *command.words) if command else _pytest_program() if driver is None else (*ours, "pytest")
        seed = config.getoption("--hypothesis-seed", None)
        return cls(
            directory=str(config.invocation_params.dir),
            program=program,
            suite_program=program if command else ours,
            options=tuple(_own_options(config, arguments, everything=command is not None)),
            suite_options=tuple(
                command.as_typed(word) if command else word for word in _own_options(config, arguments, everything=True)
            ),
            kept=tuple(_kept(arguments, [str(path) for path in config.getoption("file_or_dir", None) or ()])),
            seed=None if seed is None else str(seed),
        )

    @classmethod
    def told(cls, values: Mapping[str, Any]) -> Invocation:
        """Return the command line of the process that has started this one, by `dataclasses.asdict` and a channel
        without tuples.
        """
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**plain)

    def line(self, item: pytest.Item, extra: Sequence[str]) -> str:
        """Return the shell line for one test, with `extra` options."""
        names = item.nodeid.partition("::")[2]
        package = getattr(getattr(item, "module", None), "__name__", "").rpartition(".")[0]
        if package in _PACKAGED:
            command = (
                self.suite_program if self.suite_program == self.program else (*self.suite_program, *_PACKAGED[package])
            )
            words = [*command, *self.suite_options, *self.kept, f"{item.path.name}::{names}"]
        else:
            path = os.path.relpath(item.path, self.directory)
            words = [*self.program, *self.options, *self.kept, *self._ini(item), f"{path}::{names}"]
        return shlex.join([*words, *extra])

    def _ini(self, item: pytest.Item) -> list[str]:
        """Return the options that name ini file and root, where pytest would find others if it is given this test only."""
        if any(word.startswith(("-c", "--config-file")) for word in self.kept):
            return []
        try:
            from _pytest.config.findpaths import locate_config

            found = locate_config(Path(self.directory), [item.path.parent])[1]
        except Exception:  # an inner part of pytest: without it, the line is right wherever there is one ini file
            return []
        used = item.config.inipath
        if found == used:
            return []
        ini = os.devnull if used is None else os.path.relpath(used, self.directory)
        root = f"--rootdir={os.path.relpath(item.config.rootpath, self.directory)}"
        return ["-c", ini, *([] if any(word.startswith("--rootdir") for word in self.kept) else [root])]


def lines_for(
    item: pytest.Item, invocation: Invocation, error: BaseException | None, replayed: str | None
) -> list[str]:
    """Return the shell lines that repeat a failure of `item`: one for each of the distinct errors that Hypothesis
    found.

    Args:
        error: with the notes that Hypothesis has left on it.
        replayed: the example that this run was told to repeat.
    """
    seed = _seed_of(item, invocation)
    fallback = [f"{FLAG}={replayed}"] if replayed else [f"--hypothesis-seed={seed}"] if seed is not None else []
    extras: list[list[str]] = []
    flaky = error is not None and getattr(error, BLOB, None) is not None
    for part in [error] if flaky else parts_of(error):
        blob = getattr(part, BLOB, None)
        extras.append([f"{FLAG}={blob}"] if blob else [] if part and _is_explicit(part) else fallback)
    return list(dict.fromkeys(invocation.line(item, extra) for extra in extras or [fallback]))


def parts_of(error: BaseException | None) -> list[BaseException]:
    """Return the errors of a group that Hypothesis has made, of distinct failures or of a flaky one; else the error
    itself.
    """
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in parts_of(part)]
    return [] if error is None else [error]


def take_blobs(error: BaseException | None) -> None:
    """Move the example that Hypothesis has noted on an error, and on those in a group, from its notes to `BLOB`."""
    if error is None:
        return
    kept = []
    for note in getattr(error, "__notes__", ()):
        found = _NOTE.search(note)
        if found is None:
            kept.append(note)
        else:
            setattr(error, BLOB, f"{found['version']}:{ast.literal_eval(found['blob']).decode()}")
    if len(kept) < len(getattr(error, "__notes__", ())):
        error.__notes__ = kept
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            take_blobs(part)


def _is_explicit(error: BaseException) -> bool:
    """Return whether an error comes from an ``@example``, which every run tries first."""
    return any("explicit test case" in note or "explicit example" in note for note in getattr(error, "__notes__", ()))


def _seed_of(item: pytest.Item, invocation: Invocation) -> object:
    """Return the seed by which Hypothesis has drawn the examples of `item`; None where it has not, or by one in the
    source.
    """
    function = getattr(item, "function", None)
    if not getattr(function, "is_hypothesis_test", False) or getattr(function, "_hypothesis_internal_use_seed", None):
        return None
    return invocation.seed or getattr(function, "_hypothesis_internal_use_generated_seed", None)


def _own_options(config: pytest.Config, arguments: Sequence[str], everything: bool) -> Iterator[str]:
    """Return the options that hold the settings of this run, but for those that stand in the ini file."""
    typed = {word.partition("=")[0] for word in [*arguments, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]}
    for name, option in OPTIONS.items():
        if not option.repeats:
            continue
        text = config.getoption(name, None)
        if text is not None and option.flag not in typed and not everything:
            text = None  # in `addopts` of the ini file
        elif text is None:
            text = os.environ.get(option.variable, config.getini(name) if everything else None)
        if text is None:
            continue
        if isinstance(text, list):
            yield from (f"{option.flag}={one}" for one in text)
            continue
        value = option.parse(str(text).strip())
        if isinstance(value, bool):
            if value:
                yield option.flag
        else:
            yield option.flag if value == "cpu" else f"{option.flag}={text}"


def _kept(arguments: Sequence[str], positionals: Sequence[str]) -> Iterator[str]:
    """Choose, of the words that pytest was called with, those that determine how a test runs."""
    rest = list(positionals)
    keep = False
    words = iter(arguments)
    for word in words:
        if word == "--":
            return
        if not word.startswith("-") or word == "-":
            if word in rest:
                rest.remove(word)
                keep = False
            elif keep:
                yield word  # the value of the option before
            continue
        if word.startswith("--"):
            keep = word.partition("=")[0] not in _DROPPED | _OURS
            if keep:
                yield word
            continue
        letters = word[1:].lstrip(_SWITCHES)
        keep = bool(letters) and letters[0] not in _DROPPED_LETTERS
        if letters[:1] == "p":
            plugin = letters[1:] or next(words, "")
            keep = False
            if plugin not in _IRRELEVANT_PLUGINS:
                yield from ("-p", plugin)
        elif keep:
            yield "-" + letters


def _pytest_program() -> tuple[str, ...]:
    name = Path(sys.argv[0]).name
    if name in ("pytest", "py.test"):
        return (_reachable(name, os.path.abspath(sys.argv[0])),)
    return (_python(), "-m", "pytest")


def _program(module: str, script: str) -> tuple[str, ...]:
    """Return a script of this environment, or the module by which it goes too, as it was called."""
    beside = str(Path(sys.executable).with_name(script))
    if Path(sys.argv[0]).name == "__main__.py" or not os.path.exists(beside):
        return (_python(), "-m", module)
    return (_reachable(script, beside),)


def _python() -> str:
    names = [name for name in ("python", "python3") if _reachable(name, sys.executable) == name]
    return names[0] if names else sys.executable


def _reachable(name: str, path: str) -> str:
    """Return `name` where the shell finds that of this environment by it, `path` elsewhere."""
    found: Any = shutil.which(name)
    return name if found and os.path.dirname(os.path.abspath(found)) == os.path.dirname(path) else path
