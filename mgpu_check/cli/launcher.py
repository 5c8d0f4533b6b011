"""Run `mgpu-check` as one of many processes of a launcher: torchrun, srun, or one that sets ``RANK``, ``WORLD_SIZE``,
...

Each launched process is an agent with ranks as its children. The agent of rank 0 also starts the driver, a process that
runs the command line as on one machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mgpu_check.suite
from mgpu_check.cli.codes import WRONG_USAGE
from mgpu_check.engine.remote.launched_process import launched_process_of
from mgpu_check.plugin.session import PRELOAD
from mgpu_check.settings import Settings, all_options, resolve

if TYPE_CHECKING:
    from mgpu_check.engine.remote.credentials import Key


def run(arguments: Sequence[str], command: Callable[[], int]) -> int:
    """Run this process's part of a command with these arguments, and return the exit code.
    The driver, and a process without a launcher, call `command`. A launched process becomes an agent."""
    from mgpu_check.engine.remote.driver import is_driver, take_over

    if is_driver():
        with take_over() as driver:
            driver.exit_code = command()
            sys.stdout.flush()
        return driver.exit_code
    try:
        launched = launched_process_of(os.environ)
    except ValueError as error:
        print(f"mgpu-check: {error}", file=sys.stderr)
        return WRONG_USAGE
    if launched is None:
        return command()
    from mgpu_check.engine.remote import agent

    settings = settings_of(arguments)
    return agent.main(launched, arguments, PRELOAD, settings.simulate, settings.agent_timeout, lambda: _key(settings))


def _key(settings: Settings) -> Key | None:
    from mgpu_check.engine.remote.credentials import Key, default_path, secret_in

    if settings.trust_network:
        return None
    key_file = settings.agent_key_file
    path = default_path(os.environ) if key_file is None else Path(os.path.abspath(os.path.expanduser(key_file)))
    return Key(secret_in(path, make_directory=key_file is None), str(path))


class _Found(BaseException):
    """Carries the settings out of pytest, and ends it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings


class _LaunchQuestion:
    """A pytest plugin that `settings_of` makes for one call of pytest; its only hook ends the call by `_Found`."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        options = early_config.known_args_namespace
        ini = {name: value for name in all_options() if (value := early_config.getini(name)) is not None}
        raise _Found(resolve({name: getattr(options, name, None) for name in all_options()}, os.environ, ini))


def settings_of(arguments: Sequence[str]) -> Settings:
    """Parse the settings from `arguments` with pytest, without loading any conftest.
    Invalid settings give the defaults; the driver reports the error."""
    if arguments and arguments[0] == "pytest":
        words = list(arguments[1:])
    elif arguments and arguments[0] == "accept":
        from mgpu_check.cli import accept  # here, because other commands do not need it

        words = accept.in_pytests_words(arguments[1:])
    else:  # the packaged suite has its own ini file
        words = ["-c", str(Path(mgpu_check.suite.__file__).with_name("pytest.ini")), *arguments]
    try:
        with _quietly(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["-p", "mgpu_check", *words], plugins=[_LaunchQuestion()])
    except _Found as found:
        return found.settings
    except ValueError:
        pass
    return resolve({}, {}, {})


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Disable all warnings, and third-party plugins of pytest, whose import may have side effects."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        warnings.simplefilter("ignore")
        yield
