"""Find the commands that start the scripts of a repository: in READMEs, Makefiles, shell scripts and packaging."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = re.compile(r"README.*|Makefile|.*\.sh")
_STARTER = re.compile(
    r"\b(?:python[\d.]*|torchrun|accelerate|deepspeed|mpiexec|mpirun|srun)\s(?:\\\n|<[^<>\n]*>|[^\n`|>&;#])*"
)
_CONSOLE = re.compile(r"""(?:[\s"',=:()\[\]]|#.*)*+([\w.-]+)\s*=\s*([\w.]+:[\w.]+)""")


@dataclass(frozen=True)
class Command:
    """A command that starts a script.

    Attributes:
        place: file and line, as "README.md:85".
        script: path of the script, relative to the repository.
        arguments: of the script, with spaces between them.
        first: where users look first: the README of the repository, a Makefile or a shell script.
    """

    place: str
    script: Path
    arguments: str
    first: bool


def is_document(name: str) -> bool:
    """Return whether a file of this name may have commands."""
    return _DOCUMENT.fullmatch(name) is not None


def text_of(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def commands(root: Path, documents: Iterable[Path], modules: Mapping[str, Path]) -> Iterator[Command]:
    """Yield the commands that start a script of the repository.

    Args:
        modules: dotted name -> path of a Python file of the repository.
    """
    for document in sorted(documents, key=lambda path: (len(path.parts), path)):
        text = text_of(root / document)
        for found in _STARTER.finditer(text):
            words = found[0].replace("\\\n", " ").split()
            for index, word in enumerate(words[1:], 1):
                if script := _script(word, words[index - 1], document, modules):
                    line = text.count("\n", 0, found.start()) + 1
                    first = len(document.parts) == 1 or not document.name.startswith("README")
                    yield Command(f"{document}:{line}", script, " ".join(words[index + 1 :]), first)
                    break


def _script(word: str, before: str, document: Path, modules: Mapping[str, Path]) -> Path | None:
    if before in ("-m", "--module"):
        return modules.get(word) or modules.get(f"{word}.__main__")
    if not word.endswith(".py"):
        return None
    parts = Path(word).parts
    ending = [path for path in modules.values() if path.parts[-len(parts) :] == parts]
    exact = [path for path in ending if path in (Path(word), document.parent / word)]
    return exact[0] if exact else ending[0] if len(ending) == 1 else None


def console_scripts(root: Path, modules: Mapping[str, Path]) -> dict[Path, str]:
    """Return path -> name of the programs that the package installs, as "train" of `train = "package.cli:main"`."""
    found: dict[Path, str] = {}
    for program, target in _programs(root):
        module = target.partition(":")[0]
        path = modules.get(module) or modules.get(f"src.{module}") or modules.get(f"{module}.__init__")
        if path is not None:
            found.setdefault(path, program)
    return found


def _programs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each program that the package installs, and the function that it calls."""
    try:
        project = tomllib.loads(text_of(root / "pyproject.toml"))
    except ValueError:
        project = {}
    for keys in (("project", "scripts"), ("tool", "poetry", "scripts")):
        table: object = project
        for key in keys:
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            yield from ((program, target) for program, target in table.items() if isinstance(target, str))
    for name in ("setup.cfg", "setup.py"):
        text = text_of(root / name)
        for start in re.finditer("console_scripts", text):
            at = start.end()
            while entry := _CONSOLE.match(text, at):  # up to the next group of entry points
                yield entry[1], entry[2]
                at = entry.end()
