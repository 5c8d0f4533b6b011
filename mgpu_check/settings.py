"""Options to one frozen `Settings`: command line over environment over ini file over default.

Every value keeps its origin, so an error can say where to change it.
"""

from __future__ import annotations

import difflib
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from mgpu_check import option_values
from mgpu_check.applications import applications
from mgpu_check.option_values import ArithmeticSettings, Depth, Level, parse_arithmetic

T = TypeVar("T")

PREFIX = "MGPU_CHECK_"

DEFAULT_RANK_TIMEOUT = 60.0
DEFAULT_AGENT_TIMEOUT = 300.0

DEFAULT_LEVEL: Level = "quick"

_OPTION = "option"
_DEFAULT = "default"  # the origin of a value that was not given


@dataclass(frozen=True)
class Option(Generic[T]):
    """One setting, in its three spellings: ``--rank-timeout``, ``rank_timeout`` (ini), ``MGPU_CHECK_RANK_TIMEOUT``.

    Attributes:
        help: what it is, lower case and without a full stop.
        default: what holds where nothing is said, in words.
        command_line: how the command line has it, in argparse's words.
        repeats: a run that repeats one test is to have it, too.
    """

    name: str
    parse: Callable[[str], T]
    help: str
    default: str
    command_line: Mapping[str, Any]
    repeats: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def read(self, text: str, origin: str) -> T:
        """Return the value that `text` stands for. Raises `ValueError`: naming `origin`, the text and the valid set."""
        try:
            return self.parse(text.strip())
        except ValueError as error:
            raise ValueError(f"{origin}: {text!r} is not valid; {error}") from None


def option_field(
    value: Any,
    parse: Callable[[str], object],
    help: str,
    default: str,
    command_line: Mapping[str, Any],
    repeats: bool = True,
) -> Any:
    """Return a field of `Settings`, or of an application's, with the option that sets it.

    `value` holds if nothing is said; for the others see `Option`.
    """
    return field(default=value, metadata={_OPTION: (parse, help, default, command_line, repeats)})


def switch_field(help: str, default: str, repeats: bool = True) -> Any:
    """Return a field of an option that is off, and on without a value; `default` says what off means."""
    switch = {"action": "store_const", "const": "true"}
    return option_field(False, option_values.switch, help, default, switch, repeats)


@dataclass(frozen=True)
class Settings:
    """The settings of this run. Each field made by `option_field` is an option, with its help.

    Attributes:
        gpus: number of devices; 0 if none were asked for, None for "all" until they are counted.
        simulate: backing device of the simulated node ("cpu", "cuda:0", …); None on real devices.
        simulate_arithmetic: how the devices of a simulated node compute.
        rank_timeout, agent_timeout: seconds.
        agent_key_file: the key of a run beyond one machine; None for the default place.
        gpu_keep_warm: seconds; None for no keeper.
        applications: class -> the settings of an application, an object of that class; see `of`.
        origins: option name -> the origin of its value, in the user's words.
        per_host: number of devices of each host, empty on one machine.
        host: the host of tests that run in one process.
    """

    gpus: int | None = option_field(
        0,
        option_values.gpus,
        "how many GPUs the tests get, cuda:0 to cuda:N-1, or 'all' that are visible",
        "none",
        {"metavar": "N|all"},
    )
    simulate: str | None = option_field(
        None,
        option_values.simulate,
        "make the GPUs in software, on the CPU or on one real device such as cuda:0; proves code, never hardware",
        "real GPUs; --simulate alone: cpu",
        {"metavar": "cpu|cuda:I", "nargs": "?", "const": "cpu"},
    )
    simulate_arithmetic: ArithmeticSettings = option_field(
        ArithmeticSettings(),
        parse_arithmetic,
        "let simulated GPUs compute as healthy GPUs may: sums in another order, functions within their ulps, TF32, "
        "atomics and more; 'gpu' for all kinds",
        "cpu: as the backing device",
        {"metavar": "gpu|KINDS"},
    )
    rank_timeout: float = option_field(
        DEFAULT_RANK_TIMEOUT,
        option_values.seconds,
        "seconds that the ranks get for a test, or for one example of a property",
        f"{DEFAULT_RANK_TIMEOUT:g}",
        {"metavar": "SECONDS"},
    )
    agent_timeout: float = option_field(
        DEFAULT_AGENT_TIMEOUT,
        option_values.seconds,
        "beyond one machine: seconds to wait for processes that have not come, or are lost",
        f"{DEFAULT_AGENT_TIMEOUT:g}",
        {"metavar": "SECONDS"},
    )
    agent_key_file: str | None = option_field(
        None,
        option_values.file,
        "beyond one machine: file with the key by which the processes of a run know each other, the same on all hosts; "
        "made if it is not there",
        "mgpu-check/agent-key in $XDG_CONFIG_HOME, or in ~/.config",
        {"metavar": "FILE"},
    )
    trust_network: bool = switch_field(
        "beyond one machine: use no key file; whoever reaches the launcher's port can then run code in the run",
        "use the key file",
    )
    gpu_keep_warm: float | None = option_field(
        None,
        option_values.keep_warm,
        "keep what ranks import in a process that the next runs share, until no run has used it for SECONDS",
        f"import in each run; --gpu-keep-warm alone: {option_values.KEPT_WARM:g}",
        {"metavar": "SECONDS", "nargs": "?", "const": "true"},
    )
    strict_gpus: bool = switch_field(
        "fail, instead of skip, a test that needs more GPUs than --gpus gives", "skip, with counts"
    )
    gpu_report: tuple[str, ...] = option_field(
        (),
        option_values.reports,
        "write a summary of the run to this file, which ends in .md (Markdown); can be given "
        " several times, in the ini file one file per line",
        "none",
        {"metavar": "FILE", "action": "append"},
        repeats=False,
    )
    gpu_annotations: str | None = option_field(
        None,
        option_values.annotation_format,
        'print each failure as an annotation at the line of the code that it is about: "github" or "none"',
        "github in a workflow of GitHub, else none",
        {"metavar": "FORMAT"},
        repeats=False,
    )
    gpu_level: Level = option_field(
        DEFAULT_LEVEL,
        option_values.level,
        "how much the packaged suites do: quick, standard or long; glance: some checks of an acceptance, else as quick",
        f"{DEFAULT_LEVEL}; accept and selftest: standard",
        {"metavar": "|".join(option_values.LEVELS)},
    )
    adapt_torch_tests: bool = switch_field(
        "run classes on torch's MultiProcessTestCase and MultiProcContinuousTest on forked ranks",
        "run them in their own harness",
    )
    applications: Mapping[type[Any], Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    per_host: tuple[int, ...] = ()
    host: int = 0

    @property
    def asked(self) -> bool:
        """True if this run asks for devices at all."""
        return self.gpus != 0

    def of(self, application: type[T]) -> T:
        """Return the settings of an application: its class of options, see `Application.options`."""
        return self.applications[application] if application in self.applications else application()

    def given(self, name: str) -> bool:
        """Return whether the user has set an option, in any place."""
        return self.origins.get(name, _DEFAULT) != _DEFAULT

    @property
    def depth(self) -> Depth:
        """How much a check does: the level, or quick for a glance."""
        return option_values.depth_of(self.gpu_level)

    @property
    def gpus_of_host(self) -> int:
        """Number of devices that one process can see."""
        return self.per_host[self.host] if self.per_host else self.gpus or 0

    def counted(self, visible: int) -> Settings:
        """Return the same with ``gpus="all"`` resolved to `visible` devices."""
        return self if self.gpus is not None else replace(self, gpus=visible)


def options_of(options: Any) -> dict[str, Option[Any]]:
    """Return the options that the fields of a dataclass declare, by name."""
    rows = (row for row in fields(options) if _OPTION in row.metadata)
    return {row.name: Option(row.name, *row.metadata[_OPTION]) for row in rows}


OPTIONS = options_of(Settings)
"""The options of the core."""


@functools.cache
def all_options() -> Mapping[str, Option[Any]]:
    """Return the options of the core, and those of the applications."""
    return functools.reduce(operator.or_, map(options_of, _application_options()), OPTIONS)


def _application_options() -> list[Any]:
    return [application.options for application in applications().values() if application.options is not None]


def resolve(
    command_line: Mapping[str, str | Sequence[str] | None],
    environment: Mapping[str, str],
    ini: Mapping[str, str],
    origin_of: Callable[[str], str] = str,
) -> Settings:
    """Resolve settings from the three places that can hold them, the first of them first.

    Args:
        command_line: option name -> text, or the texts of one that can be given several times, which stand on a line
            each elsewhere; None or absent where not given.
        environment: usually `os.environ`.
        ini: option name -> text, absent where the ini file does not say.
        origin_of: where the value of an option on the command line comes from, by its flag: some commands have shorter
            flags, and some add options.

    Raises:
        ValueError: a value is not valid, or values do not fit together; names the origin and the valid set.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(all_options(), _DEFAULT)
    for name, option in all_options().items():
        for origin, text in (
            (origin_of(option.flag), command_line.get(name)),
            (f"environment variable {option.variable}", environment.get(option.variable)),
            (f"{name} in the ini file", ini.get(name)),
        ):
            if text is not None:
                values[name] = option.read(text if isinstance(text, str) else "\n".join(text), origin)
                origins[name] = origin
                break
    own = {name: value for name, value in values.items() if name in OPTIONS}
    others = {
        declared: declared(**{name: values[name] for name in options_of(declared) if name in values})
        for declared in _application_options()
    }
    settings = Settings(**own, applications=others, origins=origins)
    if settings.simulate and settings.gpus is None:
        raise ValueError(
            f"{origins['gpus']}: 'all' has no meaning on a simulated node ({origins['simulate']}); "
            "say how many devices to simulate, such as --gpus=4"
        )
    if settings.simulate and not settings.asked and origins["simulate"] == OPTIONS["simulate"].flag:
        raise ValueError("--simulate: say how many devices to simulate, such as --gpus=4 --simulate")
    if settings.simulate_arithmetic.kinds and not settings.simulate:
        flag = OPTIONS["simulate_arithmetic"].flag
        if origins["simulate_arithmetic"] == flag:
            raise ValueError(f"{flag}: real devices have an arithmetic of their own; add --simulate")
    if settings.trust_network and settings.agent_key_file is not None:
        raise ValueError(
            f"{origins['trust_network']}: a run that trusts its network uses no key file, but "
            f"{origins['agent_key_file']} names {settings.agent_key_file}; choose one of them"
        )
    for options in others.values():
        if (misuse := options.misuse(settings)) is not None:
            raise ValueError(misuse)
    return settings


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each ``MGPU_CHECK_…`` variable that nothing reads: most likely a spelling mistake."""
    variables = {option.variable for option in all_options().values()}
    lines = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in variables:
            close = difflib.get_close_matches(name, variables, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(variables))}"
            lines.append(f"environment variable {name} is unknown and has no effect; {hint}")
    return lines


_active: Settings | None = None


def activate(settings: Settings | None) -> None:
    """Make `settings` those of this process; None takes them back."""
    global _active
    _active = settings


def active() -> Settings:
    """Return the settings of the pytest run in this process.

    Outside pytest, as in a console or a script, they come from the environment alone.
    """
    return _active if _active is not None else resolve({}, os.environ, {})
