"""Find the commands that start the scripts of a repository: in READMEs, Makefiles, shell scripts and packaging."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = re.compile(r"README.*|Makefile|.*\.sh")
_STARTER = re.compile(
    r"\b(?:python[\d.]*|torchrun|accelerate|deepspeed|mpiexec|mpirun|srun)\s(?:\\\n|<[^<>\n]*>|[^\n`|>&;#])*"
)
_CONSOLE = re.compile(r"""(?:^[ \t]*(?:scripts\.)?|["'])([\w-]+)["']?\s*=\s*["']?([\w.]+):[\w.]+""", re.MULTILINE)
_PACKAGING = ("pyproject.toml", "setup.cfg", "setup.py")


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


def commands(root: Path, documents: Iterable[Path], modules: Mapping[str, Path]) -> Iterator[Command]:
    """Yield the commands that start a script of the repository.

    Args:
        modules: dotted name -> path of a Python file of the repository.
    """
    for document in sorted(documents, key=lambda path: (len(path.parts), path)):
        text = (root / document).read_text(encoding="utf-8", errors="replace")
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
    for name in _PACKAGING:
        if (root / name).is_file():
            for program, module in _CONSOLE.findall((root / name).read_text(encoding="utf-8", errors="replace")):
                path = modules.get(module) or modules.get(f"src.{module}") or modules.get(f"{module}.__init__")
                if path is not None:
                    found.setdefault(path, program)
    return found
