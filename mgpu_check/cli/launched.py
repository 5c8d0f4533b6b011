"""`mgpu-check` as one of many processes that a launcher has launched: torchrun, srun, or who sets the classic variables.

Each process is an agent, which has ranks as its children. That of rank 0 starts the driver, one more process, which runs
the command line as it would run on one machine.
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
from mgpu_check.engine.remote.variables import launched_process_of
from mgpu_check.pytest_plugin.session import PRELOAD
from mgpu_check.settings import OPTIONS, Settings, resolve

if TYPE_CHECKING:
    from mgpu_check.engine.remote.credentials import Key

__all__ = ["run", "settings_of"]

_NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"


def run(arguments: Sequence[str], command: Callable[[], int]) -> int:
    """Do the part of this process in `command`, which `arguments` stand for; the exit code.

    That is all of it, where the process was not launched with others.
    """
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
    """Return the key of this user; None where the network is trusted.

    Raises:
        UnusableKey: it cannot be had, or others may have it.
    """
    from mgpu_check.engine.remote.credentials import Key
    from mgpu_check.engine.remote.keyfile import default_path, secret_in

    if settings.trust_network:
        return None
    given = settings.agent_key_file
    path = default_path(os.environ) if given is None else Path(os.path.abspath(os.path.expanduser(given)))
    return Key(secret_in(path, make_directory=given is None), str(path))


class _Found(BaseException):
    """pytest has told what is asked, and need not go on."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings


class _Question:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        given = early_config.known_args_namespace
        ini = {name: value for name in OPTIONS if (value := early_config.getini(name)) is not None}
        raise _Found(resolve({name: getattr(given, name, None) for name in OPTIONS}, os.environ, ini))


def settings_of(arguments: Sequence[str]) -> Settings:
    """Return the settings of `mgpu-check` with these arguments, by pytest's own rules, before it loads any conftest.

    The defaults where it is asked for what cannot be: the driver tells it.
    """
    if arguments and arguments[0] == "pytest":
        words = list(arguments[1:])
    elif arguments and arguments[0] == "accept":
        from mgpu_check.cli import accept  # here: other commands do without an acceptance

        words = accept.in_pytests_words(arguments[1:])
    else:  # the suite has an ini file of its own
        words = ["-c", str(Path(mgpu_check.suite.__file__).with_name("pytest.ini")), *arguments]
    try:
        with _quietly(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["-p", "mgpu_check", *words], plugins=[_Question()])
    except _Found as found:
        return found.settings
    except ValueError:
        pass
    return resolve({}, {}, {})


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Have pytest import no plugins of others, which may do more than tell their options; and warn of nothing."""
    before = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ[_NO_PLUGINS]
        else:
            os.environ[_NO_PLUGINS] = before
