"""Check a commit out into a temporary directory, where its script runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mgpu_check.compare.comparison import ComparisonPlan
from mgpu_check.processes.rank_lists import few
from mgpu_check.processes.scratch import Scratch

_GENERATED = ("__pycache__", ".egg-info", ".pyc", ".pyo", ".so")
"""Ends of ignored names that are made from source files, so a commit has others."""


@dataclass(frozen=True)
class Revision:
    """A commit in a directory.

    Attributes:
        name: the commit for reports: "main (1a2b3c4)".
        directory: the directory that stands for the current one.
        root: the top directory of the repository's working tree.
        top: the top directory of the commit.
        own: the files of the working tree that git tracks, or would track.
        notes: what the user should know of both trees, a line each.
    """

    name: str
    directory: Path
    root: Path
    top: Path
    own: frozenset[str]
    notes: Sequence[str]

    def moved(self, word: str) -> str:
        """Return the path of a file or directory in the commit, if `word` is an absolute path in the working tree."""
        path = Path(word)
        return (
            str(self.top / path.relative_to(self.root))
            if path.is_absolute() and path.is_relative_to(self.root)
            else word
        )

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables, with the directories of the commit before the directories of the working tree."""
        paths = [os.path.realpath(path) for path in sys.path[1:] if path]
        ours = [moved for path in paths if (moved := self.moved(path)) != path and os.path.isdir(moved)]
        given = [self.moved(path) for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        return {**variables, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*ours, *given]))}

    def plan(self, plan: ComparisonPlan) -> ComparisonPlan:
        """Return the plan of the same script in the commit.

        Raises:
            ValueError: the commit has no such script.
        """
        python, *words = plan.command
        words = [self.moved(word) for word in words]
        script = next((word for word in words if not word.startswith("-")), "")
        if "-m" not in words[: words.index(script)] and not (self.directory / script).exists():
            raise ValueError(f"there is no {script} in {self.name}; give a commit that has it")
        environments = (self.environment(variables) for variables in (plan.single, plan.several))
        single, several = environments
        return replace(plan, command=[python, *words], single=single, several=several, directory=self.directory)


@contextmanager
def checked_out(revision: str) -> Iterator[Revision]:
    """Check a commit out as a temporary worktree, and remove it afterwards.

    Data that git ignores are links to those of the working tree.

    Raises:
        ValueError: git is not installed, the current directory is in no repository, or it has no such commit.
    """
    option = f"--against={revision}"
    try:
        root = Path(_git("rev-parse", "--show-toplevel").strip()).resolve()
    except FileNotFoundError:
        raise ValueError(f"{option} needs git, which is not installed") from None
    except subprocess.CalledProcessError:
        raise ValueError(
            f"{option}: {Path.cwd()} is in no git repository; run this in the repository of the script"
        ) from None
    try:
        commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise ValueError(
            f"{option}: the repository {root} has no commit {revision!r}; give a branch, a tag, or a commit of git log"
        ) from None
    here = Path.cwd().resolve().relative_to(root)
    with Scratch.new("compare") as made:
        top = made / root.name
        try:
            _git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(top), commit, at=root)
        except subprocess.CalledProcessError as error:
            raise ValueError(f"{option} cannot be checked out: {error.stderr.strip()}") from None
        try:
            if not (top / here).is_dir():
                raise ValueError(f"{option}: the directory {here} does not exist in {commit[:9]}")
            name = f"{revision} ({commit[:9]})" if not commit.startswith(revision) else commit[:9]
            notes = [*_differences(root, commit), *_linked(root, top)]
            yield Revision(name, top / here, root, top, _own(root), notes)
        finally:
            _git("worktree", "remove", "--force", str(top), at=root)


def _git(*words: str, at: Path | None = None) -> str:
    done = subprocess.run(["git", *words], cwd=at, capture_output=True, text=True, check=True)
    return done.stdout


def _listed(root: Path, *words: str) -> list[str]:
    return [name for name in _git("ls-files", "-z", *words, at=root).split("\0") if name]


def _own(root: Path) -> frozenset[str]:
    names = _listed(root, "--cached", "--others", "--exclude-standard")
    return frozenset(str(root / name) for name in names)


def _differences(root: Path, commit: str) -> Iterator[str]:
    changed = [name for name in _git("diff", "--name-only", "-z", commit, "--", at=root).split("\0") if name]
    fresh = _listed(root, "--others", "--exclude-standard")
    uncommitted = [name for name in _git("diff", "--name-only", "-z", "HEAD", "--", at=root).split("\0") if name]
    if uncommitted:
        yield f"uncommitted changes are part of the run of the working tree: {few(uncommitted, 3)}"
    if fresh:
        yield f"files that git does not track are in the working tree only: {few(fresh, 3)}"
    if not changed and not fresh:
        yield "the working tree equals the commit: both runs are of the same files"


def _linked(root: Path, top: Path) -> Iterator[str]:
    """Link the data that git ignores into the commit."""
    names = _listed(root, "--others", "--ignored", "--exclude-standard", "--directory")
    linked = []
    for name in (name.rstrip("/") for name in names):
        if not name.endswith(_GENERATED) and (top / name).parent.is_dir() and not (top / name).exists():
            (top / name).symlink_to(root / name)
            linked.append(name)
    if linked:
        yield f"both runs share what git ignores: {few(linked, 3)}"
    if (root / ".gitmodules").exists():
        yield "submodules are not checked out for the run of the commit"
