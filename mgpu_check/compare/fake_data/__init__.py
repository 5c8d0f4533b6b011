"""Make data that a script lacks, so that its training can be compared.

Most public repositories come without their data. With ``--fake-data`` a script that opens what does not exist gets
small random contents of the right form, the same in all runs and on all ranks.

1. `FakeData` is the part of the command: a directory that all runs share, the variables of their processes, the plan of
   the user, and the report of what was made.
2. In each process, `paths.py` redirects paths that the script reads to files in that directory, and `libraries.py`
   replaces functions of libraries that read data and pretrained weights.
3. `forms.py` makes the files. `evidence.py` reads from the source of the script what they must hold.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from mgpu_check.processes.scratch import Scratch

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
_MOST = 12  # lines about things that were made
_SHOWN = ("samples", "columns", "shape", "dtype", "classes")


def plan_file(text: str) -> Path:
    """Return the path of a plan: a type for `argparse`."""
    path = Path(text)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no plan in TOML: {error}") from None
    if wrong := [name for name, entry in tables.items() if not isinstance(entry, dict)]:
        raise argparse.ArgumentTypeError(f"{text!r}: {wrong[0]} is no table; write [{json.dumps(wrong[0])}]")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent} for {path.name}")
    return path


class FakeData:
    """The made data of a comparison: a command makes one for its runs, and asks for `remarks` after them.

    The directory is removed at the end of its `with` block, or of this process.
    """

    def __init__(self, plan: Path) -> None:
        """Prepare a directory. `plan`: a file that `plan_file` has accepted, or `Path()` for none."""
        self._file = None if plan.exists() else plan  # to write
        tables = tomllib.loads(plan.read_text(encoding="utf-8")) if plan.is_file() else {}
        self._scratch = Scratch.new("compare")
        Path(self._scratch.path, "plan.json").write_text(json.dumps(tables), encoding="utf-8")
        Path(self._scratch.path, "notes").touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the plan, if the user named a new file, and remove the data."""
        if self._file is not None:
            tables = (_table(note) for note in self._notes() if note["kind"] != "missing")
            self._file.write_text("\n".join(tables), encoding="utf-8")
        self._scratch.remove()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the processes of a script."""
        shared = {"_MGPU_CHECK_FAKE_DATA": json.dumps([str(self._scratch.path), ""]), "WANDB_MODE": "disabled"}
        return {**shared, **dict.fromkeys(_OFFLINE, "1")}

    def _notes(self) -> list[dict[str, Any]]:
        lines = Path(self._scratch.path, "notes").read_text(encoding="utf-8").splitlines()
        notes: dict[tuple[bool, str], dict[str, Any]] = {}
        for note in map(json.loads, lines):
            notes.setdefault((note["kind"] == "missing", note["name"]), note)
        return list(notes.values())

    def remarks(self, failed: bool) -> Iterator[str]:
        """Yield lines for a report: what was made, and, if a run `failed`, what could not be."""
        notes = self._notes()
        made = [note for note in notes if note["kind"] != "missing"]
        if made:
            number, was = ("1 thing", "was") if len(made) == 1 else (f"{len(made)} things", "were")
            yield f"fake data: {number} that the script lacks {was} made, with random contents"
        for note in made[:_MOST]:
            shown = {key: value for key, value in note["options"].items() if key in _SHOWN}
            options = (f", {key} {' '.join(it) if isinstance(it, dict) else it}" for key, it in shown.items())
            yield f"  {note['kind']} {note['name']}: {note['form']}{''.join(options)}, {_origin(note)}"
        if len(made) > _MOST:
            yield f"  and {len(made) - _MOST} more; --fake-data=plan.toml writes all"
        for note in notes if failed else ():
            if note["kind"] == "missing":
                yield f"not made: {note['name']}, {_origin(note)}: {note['form']}"
                yield f"do: {note['do']}"


def _origin(note: Mapping[str, Any]) -> str:
    return f"for {note['call']} at {note['line']}"


def _table(note: Mapping[str, Any]) -> str:
    """Return the table of a plan. Its values are JSON, but for the equals signs in tables."""
    options = ((key, json.dumps(value, separators=(", ", " = "))) for key, value in note["options"].items())
    comment = f"# {note['kind']}: {note['form']}, {_origin(note)}"
    return "\n".join([comment, f"[{json.dumps(note['name'])}]", *(f"{key} = {value}" for key, value in options), ""])
