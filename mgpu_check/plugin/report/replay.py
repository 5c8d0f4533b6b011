"""Build the shell line that repeats a failure, and run one property with the one example that has failed."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
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

from mgpu_check.applications import Application, suite_of
from mgpu_check.engine.remote import launched_process
from mgpu_check.plugin import private_names
from mgpu_check.settings import all_options
from mgpu_check.torch_hooks.patches import replaced

FLAG = "--gpu-replay"

BLOB = "_mgpu_check_blob"  # attribute of an exception that holds the Hypothesis example that raised it

_OURS = frozenset({FLAG, *(option.flag for option in all_options().values())})

# Options that select tests, stop early, run in parallel, measure or show. A single test fails in the same way without
# them. All other options are kept, because a repository's own options may change its tests.
_DROPPED = frozenset(
    """
    --lf --last-failed --ff --failed-first --nf --new-first --lfnf --last-failed-no-failures --cache-show --cache-clear
    --sw --stepwise --sw-skip --stepwise-skip --sw-reset --stepwise-reset --deselect --ignore --ignore-glob --pyargs
    --keep-duplicates --collect-only --co --exitfirst --maxfail --quiet --verbose --verbosity --tb --show-capture
    --color --code-highlight --no-header --no-summary --no-fold-skipped --durations --durations-min
    --showlocals --no-showlocals
    --full-trace --force-short-summary --fold-skipped --xfail-tb --disable-warnings --disable-pytest-warnings --pastebin
    --junitxml --junit-xml --junitprefix --junit-prefix --report-log --html --self-contained-html --setup-show --capture
    --basetemp --numprocesses --maxprocesses --max-worker-restart --dist --tx --px --rsyncdir --rsyncignore --looponfail
    --testrunuid --maxschedchunk --loadscope-reorder --no-loadscope-reorder --cov --cov-reset --cov-report --cov-config
    --no-cov --no-cov-on-fail --cov-fail-under --cov-append --cov-branch --cov-context --cov-precision --reruns
    --reruns-delay --only-rerun --rerun-except --pdb --pdbcls --trace --hypothesis-seed --hypothesis-verbosity
    --hypothesis-explain --hypothesis-show-statistics
    """.split()  # noqa: SIM905  # a list would be four times as long
)
_SWITCHES = "xvqslhdf"  # short options without a value, all dropped
_DROPPED_LETTERS = "kmnr"  # short options with a value
_IRRELEVANT_PLUGINS = ("no:cacheprovider", "no:terminal", "no:progress", "mgpu_check")

_NOTE = re.compile(r"@reproduce_failure\('(?P<version>[^']+)', (?P<blob>b'[^']*'|b\"[^\"]*\")\)")


@dataclass(frozen=True)
class CommandLine:
    """A pytest plugin that holds the `mgpu-check` command line as the user typed it."""

    words: tuple[str, ...]  # the subcommand with its own options, such as () or ("selftest", "--quick")
    arguments: tuple[str, ...]  # the arguments that pytest received
    # the prefix that the user leaves out of option names in this command: "--accept-" for ``--report`` in place of
    # ``--accept-report``
    omits: str = ""
    added: frozenset[str] = frozenset()  # options that the command has added

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.prog = " ".join(("mgpu-check", *self.words))

    def origin_of(self, flag: str) -> str:
        """Return the origin of an option's value: the option as typed, or the default of the command."""
        return f"default of {' '.join(('mgpu-check', *self.words))}" if flag in self.added else self.as_typed(flag)

    def as_typed(self, word: str) -> str:
        """Return a word of `arguments` as users type it."""
        return f"--{word.removeprefix(self.omits)}" if self.omits and word.startswith(self.omits) else word


@dataclass(frozen=True)
class Invocation:
    """The parts of this run's command line that a replay needs. Plain data, for xdist's workers."""

    directory: str  # working directory of the call
    program: tuple[str, ...]  # the shell words before the options, such as ("python", "-m", "pytest")
    suite_program: tuple[str, ...]  # the shell words for a check of the packaged suite
    options: tuple[str, ...]  # options of mgpu-check, without those from the ini file, which pytest reads again
    suite_options: tuple[str, ...]  # all options of mgpu-check; the packaged suite does not read this ini file
    kept: tuple[str, ...]  # other options of the call that may change a test
    seed: str | None  # of Hypothesis, from the command line; None if it was not given

    @classmethod
    def of(cls, config: pytest.Config) -> Invocation:
        """Return the command line of this process."""
        command = next((p for p in config.pluginmanager.get_plugins() if isinstance(p, CommandLine)), None)
        arguments = command.arguments if command else [os.fspath(a) for a in config.invocation_params.args]
        driver = launched_process.driver()
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
    def rebuilt(cls, values: Mapping[str, Any]) -> Invocation:
        """Rebuild the command line of the parent process from `dataclasses.asdict`, whose tuples have become lists."""
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**plain)

    def command_for(self, suite: Application) -> list[str]:
        """Return the words that run a packaged suite with the options of this run, without a choice of tests."""
        own = self.suite_program == self.program
        program = self.suite_program if own else (*self.suite_program, *suite.command)
        return [*program, *self.suite_options, *self.kept]

    def line(self, item: pytest.Item, extra: Sequence[str]) -> str:
        """Return the shell line for one test, with `extra` options."""
        test_path = item.nodeid.partition("::")[2]
        if suite := suite_of(item):
            words = [*self.command_for(suite), f"{item.path.name}::{test_path}"]
        else:
            path = os.path.relpath(item.path, self.directory)
            words = [*self.program, *self.options, *self.kept, *self._ini(item), f"{path}::{test_path}"]
        return shlex.join([*words, *extra])

    def _ini(self, item: pytest.Item) -> list[str]:
        """Return options for the ini file and rootdir if pytest would find a different ini file for this test alone."""
        if any(word.startswith(("-c", "--config-file")) for word in self.kept):
            return []
        try:
            located = private_names.ini_file_of(Path(self.directory), item.path.parent)
        except Exception:  # an internal of pytest; without it, the line is still correct if there is only one ini file
            return []
        current = item.config.inipath
        if located == current:
            return []
        ini = os.devnull if current is None else os.path.relpath(current, self.directory)
        root = f"--rootdir={os.path.relpath(item.config.rootpath, self.directory)}"
        return ["-c", ini, *([] if any(word.startswith("--rootdir") for word in self.kept) else [root])]


def lines_for(
    item: pytest.Item, invocation: Invocation, error: BaseException | None, replayed: str | None
) -> list[str]:
    """Return the shell lines that repeat a failure of `item`: one for each distinct error that Hypothesis found.

    `error`: the failure; `take_blobs` has been called on it. `replayed`: the value of ``--gpu-replay`` in this run, or
    None.
    """
    seed = _seed_of(item, invocation)
    fallback = [f"{FLAG}={replayed}"] if replayed else [f"--hypothesis-seed={seed}"] if seed is not None else []
    extras: list[list[str]] = []
    flaky = error is not None and getattr(error, BLOB, None) is not None
    for leaf in [error] if flaky else parts_of(error):
        blob = getattr(leaf, BLOB, None)
        # Every run tries an ``@example`` first.
        notes = "\n".join(getattr(leaf, "__notes__", ()))
        is_explicit = "explicit test case" in notes or "explicit example" in notes
        extras.append([f"{FLAG}={blob}"] if blob else [] if is_explicit else fallback)
    return list(dict.fromkeys(invocation.line(item, extra) for extra in extras or [fallback]))


def parts_of(error: BaseException | None) -> list[BaseException]:
    """Return the leaves of an exception group, as Hypothesis raises for distinct or flaky failures; else the error."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for nested in error.exceptions for leaf in parts_of(nested)]
    return [] if error is None else [error]


def take_blobs(error: BaseException | None) -> None:
    """Move the example from Hypothesis' note on an error to its attribute `BLOB`; also for the errors of a group."""
    if error is None:
        return
    kept = []
    for note in getattr(error, "__notes__", ()):
        match = _NOTE.search(note)
        if match is None:
            kept.append(note)
        else:
            setattr(error, BLOB, f"{match['version']}:{ast.literal_eval(match['blob']).decode()}")
    if len(kept) < len(getattr(error, "__notes__", ())):
        error.__notes__ = kept
    if isinstance(error, BaseExceptionGroup):
        for nested in error.exceptions:
            take_blobs(nested)


def _seed_of(item: pytest.Item, invocation: Invocation) -> object:
    """Return the seed of the Hypothesis test `item`; None if it is no Hypothesis test, or its source sets the seed."""
    function = getattr(item, "function", None)
    if not getattr(function, "is_hypothesis_test", False) or getattr(function, private_names.SEED, None):
        return None
    return invocation.seed or getattr(function, private_names.GENERATED_SEED, None)


def _own_options(config: pytest.Config, arguments: Sequence[str], everything: bool) -> Iterator[str]:
    """Yield the options of mgpu-check for this run; with `everything`, also those from the ini file."""
    typed = {word.partition("=")[0] for word in [*arguments, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]}
    for name, option in all_options().items():
        if not option.repeats:
            continue
        text = config.getoption(name, None)
        if text is not None and option.flag not in typed and not everything:
            text = None  # it comes from `addopts` in the ini file
        elif text is None:
            text = os.environ.get(option.variable, config.getini(name) if everything else None)
        if text is None:
            continue
        if isinstance(text, list):
            yield from (f"{option.flag}={argument}" for argument in text)
            continue
        value = option.parse(str(text).strip())
        if isinstance(value, bool):
            if value:
                yield option.flag
        else:
            yield option.flag if value == "cpu" else f"{option.flag}={text}"


def _kept(arguments: Sequence[str], positionals: Sequence[str]) -> Iterator[str]:
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
    beside = str(Path(sys.executable).with_name(script))
    if Path(sys.argv[0]).name == "__main__.py" or not os.path.exists(beside):
        return (_python(), "-m", module)
    return (_reachable(script, beside),)


def _python() -> str:
    commands = [name for name in ("python", "python3") if _reachable(name, sys.executable) == name]
    return commands[0] if commands else sys.executable


def _reachable(name: str, path: str) -> str:
    """Return `name` if the shell finds this environment's program by it; otherwise `path`."""
    executable: Any = shutil.which(name)
    return name if executable and os.path.dirname(os.path.abspath(executable)) == os.path.dirname(path) else path


def check_replay(text: str) -> None:
    """Raise `pytest.UsageError`, which says why, if `text` is no example of the installed version of Hypothesis."""
    version, colon, blob = text.partition(":")
    installed = importlib.metadata.version("hypothesis")
    if not colon or not blob:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: {text!r} is not valid; copy the whole line at the end of a failure's report: the "
            "value is the version of Hypothesis, a colon, and the example"
        )
    if version != installed:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: the example was recorded with Hypothesis {version}; version {installed} may draw a "
            f"different one; install hypothesis=={version}, or run the test without {FLAG}"
        )
    try:
        private_names.check_example(blob)
    except Exception:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: the text after the colon is not an example of Hypothesis; copy the whole line at "
            "the end of a failure's report"
        ) from None


def draws_on(argument: object) -> bool:
    """Return whether an argument of a test comes from `st.data()`, which draws while the test runs."""
    return type(argument).__name__ == "DataObject" and type(argument).__module__.startswith("hypothesis.")


def apply_replay(text: str, items: Sequence[pytest.Item]) -> str | None:
    """Make the one selected item run only this example. Return an error message if that is impossible."""
    if len(items) != 1:
        return f"mgpu-check: {FLAG}: it is the example of one test, but {len(items)} are selected; give one node id"
    function: Any = getattr(items[0], "function", None)
    if not getattr(function, "is_hypothesis_test", False):
        return f"mgpu-check: {FLAG}: {items[0].nodeid} draws no examples; run it without this option"
    from hypothesis import reproduce_failure

    version, _, blob = text.partition(":")
    reproduce_failure(version, blob.encode())(function)
    return None


def blob_of_this() -> str | None:
    """Return the current Hypothesis example, encoded for ``--gpu-replay``; None if it is unknown.
    Uses internals of Hypothesis, which reports an example only if it raises an `Exception`."""
    with contextlib.suppress(Exception):
        from hypothesis import __version__

        return f"{__version__}:{private_names.encoded_example()}"
    return None


@contextlib.contextmanager
def keeping_steps() -> Iterator[None]:
    """Within the context, make state machines record the text of each step, for `forwarding.steps_to`.

    Hypothesis records steps only for an observer or in the final run of an example (hypothesis/stateful.py,
    observability_enabled, 6.170). An example that hangs has no final run.
    """
    stateful: Any = sys.modules.get("hypothesis.stateful")
    with contextlib.ExitStack() as stack:
        for name, value in private_names.OBSERVED.items():
            if hasattr(stateful, name):
                stack.enter_context(replaced(stateful, name, value))
        yield


def is_final() -> bool:
    """Return whether this is the final run of an example, in which Hypothesis reports it."""
    with contextlib.suppress(Exception):
        from hypothesis.control import current_build_context

        return bool(current_build_context().is_final)
    return False
