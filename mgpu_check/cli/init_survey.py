"""Survey a repository for `mgpu-check init`: the scripts that train, and the arguments that a comparison needs.

The files are parsed, not run. `init_arguments` runs the chosen script up to its parser.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path

from mgpu_check.cli.init_documented import Command, commands, console_scripts, is_document
from mgpu_check.cli.init_hydra import configured
from mgpu_check.cli.init_source import ScriptArgument, SourceFile, facts, trains

_MOST_FILES = 5000
_MOST_BYTES = 1 << 20
_NEAR = 2  # imports from a script: farther files are of libraries
_NO_CODE_OF_THE_USER = {"build", "dist", "docs", "node_modules", "site-packages", "third_party", "vendor"}
_NO_SCRIPTS = re.compile(r"(test_.*|.*_test|conftest|setup|noxfile|__init__)\.py")
_ASIDE = {"benchmark", "benchmarks", "experimental", "experiments"}
_CHANGES_PATH = {"sys.path.append", "sys.path.insert", "setup_root"}
_PARALLEL = {
    "init_process_group": "init_process_group",
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDP": "FSDP",
    "fully_shard": "fully_shard",
    "parallelize_module": "parallelize_module",
    "init_device_mesh": "init_device_mesh",
    "Accelerator": "accelerate",
    "Fabric": "Lightning Fabric",
    "Trainer": "a Trainer",
    "trainer.fit": "a Trainer",
    "DataParallel": "DataParallel",
    "deepspeed.initialize": "DeepSpeed",
}
_PARSERS = {"ArgumentParser", "HfArgumentParser", "LightningCLI", "Typer", "cli", "command", "parse", "parse_args"}
_LIKELY_NAME = re.compile(r"(^|[_-])(pre|fine)?[_-]?(train|main|run|tune)", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingScript:
    """A script that trains.

    Attributes:
        path: relative to the repository.
        started: what a test starts: the path, "-m package.module", or the name of an installed program.
        needs: the package that must be installed, because the script cannot import it from its place; else empty.
        parallel: what it uses on several devices, such as "DistributedDataParallel"; empty for one device.
        options: its arguments: of its parser once it has run, else of Hydra's configuration, and variables that the
            command line sets.
        divided: names that the code divides by the number of ranks, in lower case.
        parses: its code has a parser of the command line.
        hydra: Hydra reads its arguments.
        autocast: it computes in narrower dtypes than float32, at least if arguments say so.
        documented: the commands of the repository that start it.
        rank: how likely it is the script that the user means; the highest comes first.
    """

    path: Path
    started: str
    needs: str
    parallel: tuple[str, ...]
    options: tuple[ScriptArgument, ...]
    divided: frozenset[str]
    parses: bool
    hydra: bool
    autocast: bool
    documented: tuple[Command, ...]
    rank: int

    @property
    def required(self) -> tuple[ScriptArgument, ...]:
        """The arguments without which the script does not start, apart from those of launchers."""
        if self.subcommands:
            return ()
        return tuple(option for option in self.options if option.required and "local" not in option.name)

    @property
    def subcommands(self) -> bool:
        """True if its first argument is the name of a subcommand."""
        return any(option.subcommand for option in self.options)

    @property
    def training_arguments(self) -> bool:
        """True if `TrainingArguments` of transformers read its arguments."""
        return any(option.name == "--per_device_train_batch_size" for option in self.options)


@dataclass(frozen=True)
class Survey:
    """The scripts of a repository that train.

    Attributes:
        files: number of files that were read.
        entries: the scripts, the likeliest first.
        named: the script that the user named, if the repository has it.
        unread: number of files that Python cannot parse.
    """

    files: int
    entries: tuple[TrainingScript, ...]
    named: TrainingScript | None = None
    unread: int = 0


def survey(root: Path, named: str = "") -> Survey:
    """Return the survey of a repository.

    Args:
        named: a script as the user names it: a path, "-m package.module", or a program that the package installs.
    """
    files: dict[Path, SourceFile] = {}
    unread = 0
    documents = []
    for path in _files(root):
        if path.suffix != ".py":
            documents.append(path)
            continue
        if read := _read(root / path):
            files[path] = read
        else:
            unread += 1
    modules = {".".join(path.with_suffix("").parts): path for path in files}
    found = _Repository(root, files, modules, console_scripts(root, modules), list(commands(root, documents, modules)))
    entries = [found.entry(path) for path in files if found.is_entry(path)]
    order = {command.script: place for place, command in reversed([*enumerate(found.documented)])}
    entries.sort(key=lambda it: (-it.rank, -len(it.documented), order.get(it.path, 0), str(it.path)))
    return Survey(len(files), tuple(entries), found.named(named), unread)


def _read(path: Path) -> SourceFile | None:
    """Return the facts of a file, or None if it cannot be parsed."""
    try:
        return facts(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return None


def _files(root: Path) -> Iterator[Path]:
    """Yield the Python files of a repository, and the documents that may show how to start them."""
    count = 0
    for directory, names, found in os.walk(root):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".")
            and name not in _NO_CODE_OF_THE_USER
            and not Path(directory, name, "pyvenv.cfg").exists()
        )
        for name in sorted(found):
            path = Path(directory, name)
            wanted = (name.endswith(".py") or is_document(name)) and path.is_file()
            if wanted and path.stat().st_size <= _MOST_BYTES and count < _MOST_FILES:
                count += 1
                yield path.relative_to(root)


@dataclass(frozen=True)
class _Repository:
    root: Path
    files: Mapping[Path, SourceFile]
    modules: Mapping[str, Path]
    programs: Mapping[Path, str]
    documented: Sequence[Command]

    def is_entry(self, path: Path) -> bool:
        if _NO_SCRIPTS.fullmatch(path.name) or "tests" in path.parts:
            return False
        starts = self.files[path].starts or path in self.programs
        return starts and trains(set().union(*(self.files[other].calls for other in self._used(path))))

    def named(self, name: str) -> TrainingScript | None:
        """Return the script of a name that the user gave, whether or not it seems to train."""
        if name.startswith("-m "):
            module = name[3:]
            here = [path for end in ("", ".__main__") if (path := self.modules.get(f"{module}{end}"))]
            installed = [path for end in ("", ".__main__") if (path := self.modules.get(f"src.{module}{end}"))]
        else:
            here = []
            installed = [path for path, program in self.programs.items() if program == name]
        for path in [*here, *installed]:
            return replace(self.entry(path), started=name, needs="" if here else _top(path))
        path = Path(os.path.relpath(self.root / name, self.root))
        if path in self.files:
            return self.entry(path)
        if not (self.root / path).is_file():
            return None
        # The survey left it out: it is elsewhere, no Python file by its name, or of another Python.
        read = _read(self.root / path)
        entry = replace(self, files={**self.files, path: read or SourceFile()}).entry(path)
        parallel = entry.parallel if read else ("code that init cannot parse",)
        return replace(entry, started=name, needs="", parallel=parallel)

    def entry(self, path: Path) -> TrainingScript:
        script = self.files[path]
        used = self._used(path)
        near = [self.files[other] for other, away in used.items() if away <= _NEAR]
        calls = set().union(*(file.calls for file in near))
        own = set().union(*(file.classes for file in near))  # a Trainer of the repository may train on one device
        foreign = calls - own - ({"trainer.fit"} if "Trainer" in own else set())
        parallel = dict.fromkeys(shown for name, shown in _PARALLEL.items() if name in foreign)
        documented = tuple(command for command in self.documented if command.script == path)
        started, needs = self._started(path)
        return TrainingScript(
            path,
            started,
            needs,
            tuple(parallel),
            tuple(script.variables or self._configured(path)),
            frozenset().union(*(self.files[other].divided for other in used)),
            parses=any(not self.files[other].calls.isdisjoint(_PARSERS) for other in used),
            hydra=script.configuration is not None,
            autocast=not calls.isdisjoint({"autocast", "GradScaler"}),
            documented=documented,
            rank=4 * bool(parallel)
            + 2 * (path in self.programs or trains(script.calls))
            + 2 * bool(_LIKELY_NAME.search(path.stem))
            + 3 * (path in self.programs or any(command.first for command in documented))
            - 2 * (not _ASIDE.isdisjoint(path.parts))
            - ("spawn" in script.calls)
            - len(path.parts),
        )

    def _configured(self, path: Path) -> list[ScriptArgument]:
        return [ScriptArgument(key, integer=value.isdecimal()) for key, value in self._configuration(path)]

    def _configuration(self, path: Path) -> list[tuple[str, str]]:
        place = self.files[path].configuration
        if place is None:
            return []
        directory, name = place
        if directory.endswith(".yaml"):  # as Hydra before 1.2 took it
            directory, name = os.path.split(directory)
        return list(configured(self.root / path.parent / directory, name))

    def _used(self, path: Path) -> dict[Path, int]:
        """Return the files that a script uses, itself first, each with its distance in imports."""
        targets = {value.rpartition(".")[0] for key, value in self._configuration(path) if key.endswith("_target_")}
        found: dict[Path, int] = {}
        waiting = [(0, path)]
        while waiting:
            away, at = heappop(waiting)
            if at in found:
                continue
            found[at] = away
            for name in sorted(self.files[at].imports | (targets if at == path else set())):
                other, place = self._resolved(at, name)
                if other is not None and other not in found:
                    # A package that is installed is a library of the script: only its first files are near.
                    heappush(waiting, (away + (1 if place == Path() or place in at.parents else 2), other))
        return found

    def _resolved(self, path: Path, name: str) -> tuple[Path | None, Path]:
        """Return the file that an import means, and the directory that must be on the path for it."""
        package = path.parent.parts
        # Beside the file, and in each directory above it: a script's own directory is on its path.
        for directory in [*(package[:depth] for depth in range(len(package), -1, -1)), ("src",)]:
            module = ".".join([*directory, name])
            if (other := self.modules.get(module) or self.modules.get(f"{module}.__init__")) is not None:
                return other, Path(*directory)
        return None, Path()

    def _started(self, path: Path) -> tuple[str, str]:
        """Return what a test starts, and the package that must be installed for it, if there is one."""
        own = self.files[path]
        if path in self.programs and not own.starts:
            return self.programs[path], _top(path)
        found = [self._resolved(path, name) for name in own.imports]
        places = {place for other, place in found if other not in (None, path)}
        away = sorted(places - {path.parent}, key=lambda place: len(place.parts))
        if own.relative and not away:
            away = [Path("src") if path.parts[0] == "src" else Path()]
        if not away or not _CHANGES_PATH.isdisjoint(own.calls):
            return str(path), ""
        outside = away[0] not in path.parents
        if outside or (path.parent in places and not own.relative):
            needed = next(other for other, place in found if other and place == away[0])
            return str(path), needed.relative_to(away[0]).parts[0].removesuffix(".py")
        parts = path.relative_to(away[0]).with_suffix("").parts
        if not all(map(str.isidentifier, parts)):
            return str(path), ""
        module = ".".join(parts).removesuffix(".__main__")
        return f"-m {module}", "" if away[0] == Path() else parts[0]


def _top(path: Path) -> str:
    """Return the package that a file belongs to: "project" of src/project/train.py."""
    return path.parts[path.parts[0] == "src"].removesuffix(".py")
