"""Find sentences that are hard to read, in docstrings, comments, messages and pages: ``python tests/prose.py [PATH
...]``.

Each pattern is one that a native speaker would mostly rewrite. A hit is a place to look at; `tests/docs/test_prose.py`
bounds their number.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hit", "Prose", "prose_of"]

LONGEST = 35
"""Words of a sentence; readers lose longer ones."""
LEAST = 5
"""Words from which a string counts as a message."""
PATTERNS = {
    name: re.compile(pattern, re.MULTILINE)
    for name, pattern in {
        "of which, of whose, of whom": r"\bof (?:which|whose|whom|those|that)\b",
        "tells, told": r"\b(?:told|tells?)\b",
        "stands, stood": r"\b(?:stands?|stood)\b(?! for| in for| alone| out)",
        "clause as a sentence": r"(?:^|(?<=[.:] ))(?:What|That|Whether|Who|Those|Which|Where) "
        r"(?!is the|are the|does|do|can|happens if)[^.?!]*\.",
        "is none, so many": r"\b(?:is|are|be|has|have) none\b|\bso many\b",
        "by which, with which": r"\b(?:by|with|from|in|on|at|for|to|after|before) (?:which|whom)\b",
        "as they are": r"\bas (?:it|they|one|he) (?:is|are|was|were)\b",
        "whatever, whoever": r"\b(?:whatever|whoever|whichever)\b",
        "negated noun": r"\b(?:nothing of|knows? nothing of|no more of|nobody|none of (?:it|them))\b",
        "goes on, looked at": r"\b(?:begins? from|goes? on|go on|looked at|looked for|looks at|comes? of|makes? up as much"
        r"|has come of)\b",
    }.items()
}
_COMMENT = re.compile(r"""(?:[^"'#]|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')*#(.*)""")
"""A line of code with a comment; tokenizing takes five times as long."""
_FOR_TOOLS = ("!", " type:", " noqa", " ruff:", " mypy:")


@dataclass(frozen=True)
class Hit:
    """One hard pattern, where it was found."""

    path: Path
    line: int
    pattern: str
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern}: {self.words}"


@dataclass
class Prose:
    """The prose of some files: how many words, and the hard patterns in it."""

    words: int
    hits: list[Hit]

    @property
    def rate(self) -> float:
        """Hard patterns per 10,000 words."""
        return 10_000 * len(self.hits) / max(1, self.words)


def prose_of(paths: Sequence[Path]) -> Prose:
    """Read Python files and pages of Markdown, and those in folders; names that begin with a dot are left out."""
    files = [_prose_of(path) for path in _files(paths)]
    return Prose(sum(file.words for file in files), [hit for file in files for hit in file.hits])


@functools.cache
def _prose_of(path: Path) -> Prose:
    found = Prose(0, [])
    for line, text in _texts(path):
        found.words += len(text.split())
        found.hits += [Hit(path, line + below, pattern, words) for below, pattern, words in _hits(text)]
    return found


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.suffix in (".py", ".md") and not hidden:
                yield file


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring, message, comment, or paragraph."""
    source = path.read_text(encoding="utf-8")
    return _paragraphs(source) if path.suffix == ".md" else _texts_of_code(source)


def _paragraphs(source: str) -> Iterator[tuple[int, str]]:
    line, in_code = 1, False
    for block in re.split(r"(\n\s*\n)", source):
        if "```" in block:
            in_code ^= block.count("```") % 2 == 1
        elif not in_code and not block.lstrip().startswith(("|", "[")):  # tables and link definitions
            yield line, block
        line += block.count("\n")


def _texts_of_code(source: str) -> Iterator[tuple[int, str]]:
    within: set[int] = set()  # the lines of texts of several lines, all but the last
    for node in _nodes(ast.parse(source)):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            within.update(range(node.lineno, node.end_lineno or 0))
            if len(text.split()) >= LEAST:
                yield node.lineno, text
    for number, line in enumerate(source.splitlines(), 1):
        comment = _COMMENT.match(line) if "#" in line and number not in within else None
        if comment and not comment[1].startswith(_FOR_TOOLS):
            yield number, comment[1].strip()


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree but for names; `ast.walk` takes three times as long."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            if value.__class__ is list:
                left += [one for one in value if isinstance(one, ast.AST) and one.__class__ is not ast.Name]
            elif isinstance(value, ast.AST) and value._fields and value.__class__ is not ast.Name:
                left.append(value)


def _hits(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield how many lines below the first, the pattern, and the words."""
    for name, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()), name, match.group(0).replace("\n", " ")
    for sentence in re.split(r"(?<=[.;:?!])\s+", text):
        if len(sentence.split()) > LONGEST:
            yield 0, f"sentence of more than {LONGEST} words", " ".join(sentence.split()[:8]) + " …"


def main() -> None:
    parser = argparse.ArgumentParser(description="List hard sentences, and how many there are per 10,000 words.")
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("mgpu_check"), Path("docs"), Path("README.md")])
    found = prose_of(parser.parse_args().paths)
    for hit in found.hits:
        print(hit)
    for name, count in Counter(hit.pattern for hit in found.hits).most_common():
        print(f"{count:6}  {name}")
    print(f"{found.rate:6.1f}  hard patterns per 10,000 of {found.words} words")


if __name__ == "__main__":
    main()
