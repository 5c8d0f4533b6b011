"""Read the configuration of a script that Hydra starts, as far as `mgpu-check init` needs it.

YAML is read line by line, because its package may not be installed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_DEFAULT = re.compile(r"\s*-\s*(?:([\w/]+)\s*:\s*)?([\w/]+)(?:\.yaml)?\s*(?:#.*)?")
_ENTRY = re.compile(r"( *)(\w+):\s*([^#]*?)\s*(?:#.*)?")


def configured(directory: Path, name: str, package: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield key and value of the entries of a configuration, as "data.batch_size" and "64".

    Args:
        package: the groups that lead to this file.
    """
    path = directory / (name if name.endswith(".yaml") else f"{name}.yaml")
    if not path.is_file():
        return
    above: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if above and above[0][1] == "defaults" and (default := _DEFAULT.fullmatch(line)):
            group = default[1] or ""
            yield from configured(directory / group, default[2], [*package, *group.split("/")] if group else package)
        elif entry := _ENTRY.fullmatch(line):
            while above and above[-1][0] >= len(entry[1]):
                above.pop()
            above.append((len(entry[1]), entry[2]))
            yield ".".join([*package, *(key for _, key in above)]), entry[3]
