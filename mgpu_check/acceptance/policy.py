"""Read the policy of a site: what each kind of finding means for the verdict there."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from mgpu_check.acceptance.findings import KINDS
from mgpu_check.devices.observations import Ruling

_RULINGS: tuple[Ruling, ...] = ("accept", "warn", "reject")
_TABLE = "findings"
_EXAMPLE = 'a table [findings] with lines such as MGPU-PERSISTENCE-MODE = "accept"'
_PAGE = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/reference/findings.md lists all ids"


def read_policy(path: Path) -> dict[str, Ruling]:
    """Return the rulings of a TOML file, by id of the kind of finding."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}. Give a TOML file with {_EXAMPLE}"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}. Give a TOML file with {_EXAMPLE}") from error
    if other := sorted(set(document) - {_TABLE}):
        raise ValueError(f"{path}: {other[0]} is not known here; give {_EXAMPLE}")
    rows = document.get(_TABLE)
    if not isinstance(rows, dict):
        raise ValueError(f"{path}: [{_TABLE}] is missing; give {_EXAMPLE}")
    found: dict[str, Ruling] = {}
    for name, value in rows.items():
        if name not in KINDS:
            close = difflib.get_close_matches(name.upper(), KINDS, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(KINDS)}."
            raise ValueError(f"{path}: {_TABLE}.{name} is not the id of a finding; {hint} {_PAGE}")
        ruling = next((one for one in _RULINGS if one == value), None)
        if ruling is None:
            raise ValueError(f"{path}: {_TABLE}.{name} is {value!r}; choose one of {', '.join(_RULINGS)}")
        found[name] = ruling
    return found
