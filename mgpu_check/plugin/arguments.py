"""Read options whose value may be left out."""

from __future__ import annotations

import copy
import re

import pytest

from mgpu_check.settings import OPTIONS

_VALUES = {"--simulate": r"cpu|cuda:\d+", "--gpu-keep-warm": r"\d+(\.\d*)?"}
"""Options whose value may be left out, and the form of a value."""


def complete_values(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Parse ``--simulate tests/`` as ``--simulate=cpu tests/``: the value of such an option is never a path."""
    alone = [
        index
        for index, argument in enumerate(args)
        if argument in _VALUES and not re.fullmatch(_VALUES[argument], "".join(args[index + 1 : index + 2]))
    ]
    if not alone:
        return
    for index in alone:
        args[index] += "=" + OPTIONS[args[index][2:].replace("-", "_")].command_line["const"]
    known = parser.parse_known_args(args, namespace=copy.copy(early_config.option))
    # pytest sets this after it has parsed the arguments. Without it, conftests above the root would be loaded.
    known.confcutdir = early_config.known_args_namespace.confcutdir
    early_config.known_args_namespace = known
