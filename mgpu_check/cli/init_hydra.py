"""Read the configuration of a script that Hydra starts, as far as `mgpu-check init` needs it.

YAML is read line by line, because its package may not be installed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mgpu_check.cli.init_documented import text_of

_DEFAULT = re.compile(r"\s*-\s*(?:(?:override|optional)\s+)*(?:([\w/]+)\s*:\s*)?([\w/]+)(?:\.yaml)?\s*(?:#.*)?")
_ENTRY = re.compile(r"( *)(\w+):\s*([^#]*?)\s*(?:#.*)?")


def configured(
    root: Path, name: str, groups: Sequence[str] = (), seen: set[Path] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield key and value of the entries of a configuration, as "data.batch_size" and "64".

    Args:
        root: the directory of the whole configuration.
        groups: the directories from there to this file, which are the package of its entries.
        seen: files that were read.
    """
    path = root.joinpath(*groups, name if name.endswith(".yaml") else f"{name}.yaml")
    seen = set() if seen is None else seen
    if path in seen:
        return
    seen.add(path)
    above: list[tuple[int, str]] = []
    for line in text_of(path).splitlines():
        if above and above[0][1] == "defaults" and (default := _DEFAULT.fullmatch(line)):
            wanted = "/".join(filter(None, default.groups()))  # "data/images"; "/data/images" starts at the root
            *directories, file = wanted.strip("/").split("/")
            yield from configured(root, file, [*(() if wanted[0] == "/" else groups), *directories], seen)
        elif entry := _ENTRY.fullmatch(line):
            while above and above[-1][0] >= len(entry[1]):
                above.pop()
            above.append((len(entry[1]), entry[2]))
            yield ".".join([*groups, *(key for _, key in above)]), entry[3]
