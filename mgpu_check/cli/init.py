"""`mgpu-check init`: write a first test for the training script of a repository, and run it.

The survey finds the scripts that train, the commands that start them (in READMEs, Makefiles, shell scripts and
packaging), and the arguments that a comparison needs. It parses files and does not run them; `init_arguments` runs the
chosen script up to its parser. Configuration of Hydra is read line by line, because the package for YAML may not be
installed here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

import pytest

from mgpu_check.cli.codes import INTERRUPTED, RIGHT, UNDECIDED, WRONG, Parser
from mgpu_check.cli.init_arguments import ScriptArgument, SourceFile, facts, learned, trains
from mgpu_check.cli.run_options import after_options, is_python, launched_by
from mgpu_check.errors import NotCompared, ScalingMismatch

_DOCUMENT = re.compile(r"README.*|Makefile|.*\.sh")
_STARTER = re.compile(
    r"\b(?:python[\d.]*|torchrun|accelerate|deepspeed|mpiexec|mpirun|srun)\s(?:\\\n|<[^<>\n]*>|[^\n`|>&;#])*"
)


@dataclass(frozen=True)
class Command:
    """A command that starts a script."""

    location: str  # file and line, as "README.md:85"
    script: Path  # path of the script, relative to the repository
    arguments: str  # of the script, with spaces between them
    prominent: bool  # where users look first: the README of the repository, a Makefile or a shell script


def text_of(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def commands(root: Path, documents: Iterable[Path], modules: Mapping[str, Path]) -> Iterator[Command]:
    """Yield the commands that start a script of the repository. `modules` has its Python files by dotted name."""
    for document in sorted(documents, key=lambda path: (len(path.parts), path)):
        text = text_of(root / document)
        for match in _STARTER.finditer(text):
            words = match[0].replace("\\\n", " ").split()
            for index, word in enumerate(words[1:], 1):
                if script := _script(word, words[index - 1], document, modules):
                    line = text.count("\n", 0, match.start()) + 1
                    prominent = len(document.parts) == 1 or not document.name.startswith("README")
                    yield Command(f"{document}:{line}", script, " ".join(words[index + 1 :]), prominent)
                    break


def _script(word: str, before: str, document: Path, modules: Mapping[str, Path]) -> Path | None:
    if before in ("-m", "--module"):
        return modules.get(word) or modules.get(f"{word}.__main__")
    if not word.endswith(".py"):
        return None
    segments = Path(word).parts
    ending = [path for path in modules.values() if path.parts[-len(segments) :] == segments]
    exact = [path for path in ending if path in (Path(word), document.parent / word)]
    return exact[0] if exact else ending[0] if len(ending) == 1 else None


def console_scripts(root: Path, modules: Mapping[str, Path]) -> dict[Path, str]:
    """Return path -> name of the programs that the package installs, as "train" of `train = "package.cli:main"`."""
    scripts: dict[Path, str] = {}
    for program, target in _programs(root):
        module = target.partition(":")[0]
        path = modules.get(module) or modules.get(f"src.{module}") or modules.get(f"{module}.__init__")
        if path is not None:
            scripts.setdefault(path, program)
    return scripts


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


_DEFAULT = re.compile(r"\s*-\s*(?:(?:override|optional)\s+)*(?:([\w/]+)\s*:\s*)?([\w/]+)(?:\.yaml)?\s*(?:#.*)?")
_ENTRY = re.compile(r"( *)(\w+):\s*([^#]*?)\s*(?:#.*)?")


def configured(
    root: Path, name: str, groups: Sequence[str] = (), visited: set[Path] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield key and value of the entries of a configuration, as "data.batch_size" and "64".

    `root` is the directory of the whole configuration, and `groups` the directories from there to this file, which are
    the package of its entries. Files in `visited` were read.
    """
    path = root.joinpath(*groups, name if name.endswith(".yaml") else f"{name}.yaml")
    visited = set() if visited is None else visited
    if path in visited:
        return
    visited.add(path)
    above: list[tuple[int, str]] = []
    for line in text_of(path).splitlines():
        if above and above[0][1] == "defaults" and (default := _DEFAULT.fullmatch(line)):
            wanted = "/".join(filter(None, default.groups()))  # "data/images"; "/data/images" starts at the root
            *directories, file = wanted.strip("/").split("/")
            yield from configured(root, file, [*(() if wanted[0] == "/" else groups), *directories], visited)
        elif entry := _ENTRY.fullmatch(line):
            while above and above[-1][0] >= len(entry[1]):
                above.pop()
            above.append((len(entry[1]), entry[2]))
            yield ".".join([*groups, *(key for _, key in above)]), entry[3]


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
    """A script that trains."""

    path: Path  # relative to the repository
    started: str  # what a test starts: the path, "-m package.module", or the name of an installed program
    needs: str  # the package that must be installed, because the script cannot import it from its place; else empty
    # what it uses on several devices, such as "DistributedDataParallel"; empty for one device
    parallel: tuple[str, ...]
    # its arguments: of its parser once it has run, else of Hydra's configuration, and variables that the command line
    # sets
    options: tuple[ScriptArgument, ...]
    divided: frozenset[str]  # names that the code divides by the number of ranks, in lower case
    parses: bool  # its code has a parser of the command line
    hydra: bool  # Hydra reads its arguments
    autocast: bool  # it computes in narrower dtypes than float32, at least if arguments say so
    documented: tuple[Command, ...]  # the commands of the repository that start it
    rank: int  # how likely it is the script that the user means; the highest comes first
    missing: tuple[str, ...] = ()  # packages that it imports, and that are not installed

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
    """The scripts of a repository that train."""

    files: int  # number of files that were read
    entries: tuple[TrainingScript, ...]  # the scripts, the likeliest first
    named: TrainingScript | None = None  # the script that the user named, if the repository has it
    unread: int = 0  # number of files that Python cannot parse


def survey(root: Path, named: str = "") -> Survey:
    """Survey a repository. `named` is the user's script: a path, "-m package.module", or an installed program."""
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
    documented = list(commands(root, documents, modules))
    repository = _Repository(root, files, modules, console_scripts(root, modules), documented)
    entries = [repository.entry(path) for path in files if repository.is_entry(path)]
    order = {command.script: index for index, command in reversed([*enumerate(repository.documented)])}
    entries.sort(key=lambda it: (-it.rank, -len(it.documented), order.get(it.path, 0), str(it.path)))
    return Survey(len(files), tuple(entries), repository.named(named), unread)


def _read(path: Path) -> SourceFile | None:
    try:
        return facts(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return None


def _files(root: Path) -> Iterator[Path]:
    """Yield the Python files of a repository, and the documents that may show how to start them."""
    count = 0
    for directory, folders, file_names in os.walk(root):
        own = (name for name in folders if not name.startswith(".") and name not in _NO_CODE_OF_THE_USER)
        folders[:] = sorted(name for name in own if not Path(directory, name, "pyvenv.cfg").exists())
        for name in sorted(file_names):
            path = Path(directory, name)
            wanted = (name.endswith(".py") or _DOCUMENT.fullmatch(name)) and path.is_file()
            if wanted and path.stat().st_size <= _MOST_BYTES and count < _MOST_FILES:
                count += 1
                yield path.relative_to(root)


@dataclass(frozen=True)
class _Repository:
    """The files of a repository: `survey` makes it once they are read, and asks it for scripts."""

    root: Path
    files: Mapping[Path, SourceFile]
    modules: Mapping[str, Path]
    programs: Mapping[Path, str]
    documented: Sequence[Command]

    def is_entry(self, path: Path) -> bool:
        if _NO_SCRIPTS.fullmatch(path.name) or "tests" in path.parts:
            return False
        starts = self.files[path].starts or path in self.programs
        return starts and trains(set().union(*(self.files[used_path].calls for used_path in self._used(path))))

    def named(self, name: str) -> TrainingScript | None:
        """Return the script of a name that the user gave, whether or not it seems to train."""
        matches: list[Path] = []
        installed = [path for path, program in self.programs.items() if program == name]
        if name.startswith("-m "):
            spellings = (name[3:], f"{name[3:]}.__main__")
            matches = [path for module in spellings if (path := self.modules.get(module))]
            installed = [path for module in spellings if (path := self.modules.get(f"src.{module}"))]
        for path in [*matches, *installed]:
            return replace(self.entry(path), started=name, needs="" if matches else _top(path))
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
        distances = self._used(path)
        near = [self.files[used_path] for used_path, away in distances.items() if away <= _NEAR]
        calls = set().union(*(file.calls for file in near))
        own = set().union(*(file.classes for file in near))  # a Trainer of the repository may train on one device
        foreign = calls - own - ({"trainer.fit"} if "Trainer" in own else set())
        parallel = dict.fromkeys(shown for name, shown in _PARALLEL.items() if name in foreign)
        documented = tuple(command for command in self.documented if command.script == path)
        started, needs = self._started(path)
        options = [ScriptArgument(key, integer=value.isdecimal()) for key, value in self._configuration(path)]
        return TrainingScript(
            path,
            started,
            needs,
            tuple(parallel),
            tuple(script.variables or options),
            frozenset().union(*(self.files[used_path].divided for used_path in distances)),
            parses=any(not self.files[used_path].calls.isdisjoint(_PARSERS) for used_path in distances),
            hydra=script.configuration is not None,
            autocast=not calls.isdisjoint({"autocast", "GradScaler"}),
            documented=documented,
            rank=4 * bool(parallel)
            + 2 * (path in self.programs or trains(script.calls))
            + 2 * bool(_LIKELY_NAME.search(path.stem))
            + 3 * (path in self.programs or any(command.prominent for command in documented))
            - 2 * (not _ASIDE.isdisjoint(path.parts))
            - ("spawn" in script.calls)
            - len(path.parts),
            missing=self._missing(path),
        )

    def _missing(self, path: Path) -> tuple[str, ...]:
        """Return the packages that importing a script needs, and that neither the repository nor Python has.
        None are known to be missing if its files change where Python looks for them."""
        packages: dict[str, bool] = {}  # whether it is missing
        visited, waiting = {path}, [path]
        while waiting:
            at = waiting.pop()
            for name in sorted(self.files[at].needs):
                parts = name.split(".")
                files = [self._resolved(at, ".".join(parts[:depth]))[0] for depth in range(1, len(parts) + 1)]
                inside = [file for file in files if file is not None and file not in visited]
                visited.update(inside)
                waiting += inside
                packages.setdefault(parts[0], not any(files) and not _installed(parts[0]))
        if any(not _CHANGES_PATH.isdisjoint(self.files[file].calls) for file in visited):
            return ()
        own = {part.removesuffix(".py") for file in self.files for part in file.parts}
        return tuple(name for name, missing in packages.items() if missing and name not in own)

    def _configuration(self, path: Path) -> list[tuple[str, str]]:
        configuration = self.files[path].configuration
        if configuration is None:
            return []
        directory, name = configuration
        if directory.endswith(".yaml"):  # as Hydra before 1.2 took it
            directory, name = os.path.split(directory)
        return list(configured(self.root / path.parent / directory, name))

    def _used(self, path: Path) -> dict[Path, int]:
        """Return the files that a script uses, itself first, each with its distance in imports."""
        targets = {value.rpartition(".")[0] for key, value in self._configuration(path) if key.endswith("_target_")}
        distances: dict[Path, int] = {}
        waiting = [(0, path)]
        while waiting:
            away, at = heappop(waiting)
            if at in distances:
                continue
            distances[at] = away
            for name in sorted(self.files[at].imports | (targets if at == path else set())):
                imported, import_root = self._resolved(at, name)
                if imported is not None and imported not in distances:
                    # A package that is installed is a library of the script: only its first files are near.
                    farther = 1 if import_root == Path() or import_root in at.parents else 2
                    heappush(waiting, (away + farther, imported))
        return distances

    def _resolved(self, path: Path, name: str) -> tuple[Path | None, Path]:
        """Return the file that an import means, and the directory that must be on the path for it."""
        package = path.parent.parts
        # Beside the file, and in each directory above it: a script's own directory is on its path.
        for directory in [*(package[:depth] for depth in range(len(package), -1, -1)), ("src",)]:
            module = ".".join([*directory, name])
            if (resolved := self.modules.get(module) or self.modules.get(f"{module}.__init__")) is not None:
                return resolved, Path(*directory)
        return None, Path()

    def _started(self, path: Path) -> tuple[str, str]:
        """Return what a test starts, and the package that must be installed for it, if there is one."""
        own = self.files[path]
        if path in self.programs and not own.starts:
            return self.programs[path], _top(path)
        resolutions = [self._resolved(path, name) for name in own.imports]
        places = {import_root for imported, import_root in resolutions if imported not in (None, path)}
        away = sorted(places - {path.parent}, key=lambda root: len(root.parts))
        if own.relative and not away:
            away = [Path("src") if path.parts[0] == "src" else Path()]
        if not away or not _CHANGES_PATH.isdisjoint(own.calls):
            return str(path), ""
        outside = away[0] not in path.parents
        if outside or (path.parent in places and not own.relative):
            needed = next(imported for imported, import_root in resolutions if imported and import_root == away[0])
            return str(path), needed.relative_to(away[0]).parts[0].removesuffix(".py")
        segments = path.relative_to(away[0]).with_suffix("").parts
        if not all(map(str.isidentifier, segments)):
            return str(path), ""
        module = ".".join(segments).removesuffix(".__main__")
        return f"-m {module}", "" if away[0] == Path() else segments[0]


def _top(path: Path) -> str:
    """Return the package that a file belongs to: "project" of src/project/train.py."""
    return path.parts[path.parts[0] == "src"].removesuffix(".py")


_USAGE = "mgpu-check init [--gpus=N] [--output=FILE] [--no-run] [-- script.py [args...]]"
_SAMPLES = 8  # of all ranks together: 1, 2, 4 and 8 ranks divide it
_DIVIDED = f"{{{_SAMPLES}/W}}"
_REQUIREMENTS = ("requirements.txt", "requirements/requirements.txt", "requirements-dev.txt")
_NAMED = 5  # entries
_LONGEST = 200  # characters of a command
_DIGEST = re.compile(r"(?<=Written by `mgpu-check init`), ([0-9a-f]{8})(?=\.)")
_HOW_TO = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to"


@dataclass(frozen=True)
class _Fit:
    """How to set an argument of a name, if the script has it, and what that assumes."""

    name: str
    value: str
    assumes: str
    unless: str = r"(?!)"
    integer: bool = False

    def fits(self, option: ScriptArgument) -> bool:
        named = re.fullmatch(self.name, option.variable) and not re.search(self.unless, option.variable)
        return bool(named) and option.integer >= self.integer


_BATCH = _Fit(
    r"(.*_)?(batch(_?size)?|bsz?)(_per_.*)?",
    _DIVIDED,
    f"{{}} is the batch of one rank, so that {_SAMPLES} samples are divided among all ranks",
    unless="val|eval|test|global|total",
)
_GLOBAL_BATCH = _Fit(
    r"(.*_)?(batch(_?size)?|bsz?)",
    str(_SAMPLES),
    f"{{}} is the batch of all ranks: {_SAMPLES} samples",
    unless="val|eval|test",
)
_ACCUMULATION = _Fit(
    r"(.*_)?accum(ulat(e|ion))?(_.*)?",
    str(_SAMPLES),
    f"{{}} is divided by the number of ranks: {_SAMPLES} micro-batches",
)
_MICRO_BATCHES = _Fit(
    _ACCUMULATION.name,
    "{2*W}",
    "{} is divided by the number of ranks: each has two micro-batches, which share the samples of one device",
)
_SIZES = (_BATCH, _GLOBAL_BATCH, _ACCUMULATION)  # the rows that set the size of the global batch

_DEVICES = _Fit(r"(n_?|num_)?(devices|gpus)", "{W}", "{} is the number of ranks", integer=True)
_ROWS = (
    _Fit(r"(n_?|num_|max_|total_)?epochs?", "1", "one epoch has two optimizer steps"),
    _Fit(r"(n_?|num_)?(data_?|loader_)?(num_)?workers?|n_?j|dataloader_num_workers", "0", "loading needs no workers"),
    _Fit(r"(max_|num_|n_)?eval(uation)?_(iters?|batches)", "1", "an evaluation takes one batch"),
    _Fit(r"(random_?|manual_?)?seed", "1", "one device and all ranks start from one seed"),
    _DEVICES,
)
_OTHER = _Fit("", "1", "{} is 1: the script needs an integer")  # for a positional argument that no row fits

_LAUNCH = re.compile(r"-+(\w+[-_])?(distributed|ddp|fsdp)|-+(dist[-_](url|backend)|world[-_]size|rank)")  # of ranks
_LOCAL_RANK = re.compile(r"local_?rank")
_MODEL = re.compile(r"(.*_)?(model|arch|net|network|backbone)(_?(name|type|size))?")
_SMALL = (r"(?<!\d)18(?!\d)", r"atto|femto|pico|nano|micro|mini|tiny|debug", r"small|(^|[-_/])x*s([-_/\d]|$)")
"""Marks of small models in the names of choices, the likeliest first."""
_DATA = re.compile(r"(.*_)?(data(set)?s?|coco|imagenet|root|corpus|images)(_?(path|dir|root|folder|file)s?)?")
"""Names of arguments for data: what does not exist there is made."""
_PLACEHOLDER = re.compile(r"\[[^\]]*\]|<[^<>]*>|\{[^{}]*\}|\$\{?\w+\}?|\.\.\.|…|\b[A-Z]+_[A-Z_]+\b")
_NO_TRAINING = re.compile(r"-+(eval\w*|test\w*|infer\w*|generate|sample|resume)\b")
_UNUSABLE = re.compile(rf"{_PLACEHOLDER.pattern}|['\"\\]|{_NO_TRAINING.pattern}")


def main(argv: Sequence[str]) -> int:
    """Survey the current directory, write a test, and run it.

    Return 0 if the test passed, and with ``--no-run``; 1 if it failed; 2 if no script was found, or if nothing was
    compared; 4 for wrong usage.
    """
    parser = Parser(
        prog="mgpu-check init",
        usage=_USAGE,
        description="Find the training script of the current directory, write a test that compares it on one device "
        "and on several, and run it on simulated GPUs. The script runs until it parses its arguments.",
        epilog="Name the script after -- if another one is found, or if it needs arguments: mgpu-check init -- "
        "train.py --data=samples",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=_gpus, default=2, metavar="N", help="simulated GPUs of the run (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("tests/test_scaling.py"), metavar="FILE", help="the test")
    parser.add_argument("--simulate", action="store_true", help="as it always does: the run needs no GPU")
    parser.add_argument("--no-run", action="store_true", help="write the test, and do not run it")
    at = list(argv).index("--") if "--" in argv else len(argv)
    own, program = list(argv[:at]), list(argv[at + 1 :])
    parsed = parser.parse_args(own)
    if os.path.lexists(parsed.output) and not _unchanged(parsed.output):
        parser.error(f"{parsed.output} exists; remove it, or name another file with --output=FILE")
    script, arguments = _named_script(program)
    surveyed = survey(Path.cwd(), script)
    unread = f", {surveyed.unread} not readable" if surveyed.unread else ""
    print(f"mgpu-check init: {surveyed.files} Python files{unread}")
    if script and surveyed.named is None:
        parser.error(f"there is no script {script} in {Path.cwd()}; give its path, with its arguments")
    entry = surveyed.named or next(iter(surveyed.entries), None)
    if entry is None:
        print(
            "no script that trains was found: none that starts by itself calls backward() and step(), or a Trainer\n"
            f"do: name it, mgpu-check init -- train.py --args; or test a step or a loader: {_HOW_TO}/gate.md"
        )
        return UNDECIDED
    if entry.missing:
        print(f"nothing was written: {entry.path} imports what is not installed: {', '.join(entry.missing)}")
        requirements = next((f", as by pip install -r {name}" for name in _REQUIREMENTS if Path(name).is_file()), "")
        print(f"do: install what provides it{requirements}, and call init again")
        return UNDECIDED
    unknown = None
    if entry.parses and not entry.options and not entry.hydra:
        options, unknown = learned(entry.started, arguments)
        entry = replace(entry, options=options)
    words, assumed = fitted_arguments(entry, arguments)
    if entry.autocast:
        assumed.append("autocast and GradScaler are off: rounding to narrower dtypes hides mistakes")
    _tell(entry, surveyed, assumed, unknown)
    example = f"mgpu-check init -- {shlex.join(program) or f'{entry.started} {_example(entry)}'}"
    if missing := _missing(entry, words):
        print(f"nothing was written: the script needs {', '.join(missing)}")
        print(f"do: give what it needs, as in\n    mgpu-check init -- {entry.started} {_example(entry)}")
        return UNDECIDED
    try:
        text = _test(entry.started, words, assumed, entry.autocast)
    except UnicodeEncodeError as error:
        parser.error(f"the command has bytes that are no UTF-8 text: {error.object[error.start : error.end]!a}")
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    parsed.output.write_text(text, encoding="utf-8")
    print(f"wrote {parsed.output}")
    command = ["pytest", f"--gpus={parsed.gpus}", "--simulate", str(parsed.output)]
    if parsed.no_run:
        print(f"run it: {shlex.join(command)}")
        return RIGHT
    print(f"running: {shlex.join(command)}", flush=True)
    made = _test(entry.started, words, assumed, entry.autocast, fake_data=True)
    watch, code = _run(parsed.output, text, made, command)
    if watch.verdict(code):
        return code
    if watch.interrupted:
        print(f"no verdict: interrupted; {parsed.output} is kept. Smaller arguments after -- make its runs shorter")
        return INTERRUPTED
    print(f"no verdict: nothing was compared, for the reason above, and {parsed.output} is no test yet")
    advice = "install or give what the script lacks" if watch.untrained else "follow the report above"
    print(f"do: {advice}, and call init again, which replaces the test if it is unchanged:")
    print(f"    {example}")
    print(f"see: {_HOW_TO}/compare.md")
    return UNDECIDED


def _run(output: Path, text: str, made: str, command: Sequence[str]) -> tuple[_ComparisonWatch, int]:
    """Run the new test; if the script makes no step, again with the text `made`, which makes data for it."""
    watch = _ComparisonWatch()
    code = watch.run(command)
    if watch.verdict(code) or not watch.untrained or watch.interrupted:
        return watch, code
    output.write_text(made, encoding="utf-8")
    print(
        f"the script made no step, so {output} makes small random data in place of what is missing: fake_data=True. "
        "Remove it to test with yours"
    )
    print(f"running again: {shlex.join(command)}", flush=True)
    for module in [name for name, module in sys.modules.items() if _is_of(module, output)]:
        del sys.modules[module]
    watch = _ComparisonWatch()
    code = watch.run(command)
    if not (watch.verdict(code) or watch.interrupted):
        output.write_text(text, encoding="utf-8")
    return watch, code


class _ComparisonWatch:
    """A plugin that `main` gives to the run of the new test, and then asks whether the test compared the script."""

    passed = False
    compared = False
    untrained = False
    interrupted = False

    def run(self, command: Sequence[str]) -> int:
        return int(pytest.main(list(command[1:]), plugins=[self]))

    def verdict(self, code: int) -> bool:
        """Return whether the test compared the script."""
        return (code == RIGHT and self.passed) or (code == WRONG and self.compared)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # The workers of pytest-xdist keep their exceptions.
        self.compared = session.config.pluginmanager.hasplugin("dsession")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.interrupted = excinfo.type is KeyboardInterrupt  # pytest also calls this when it stops by itself

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed |= report.when == "call" and report.passed

    def pytest_exception_interact(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None:
            self.compared |= isinstance(call.excinfo.value, ScalingMismatch)
            self.untrained |= isinstance(call.excinfo.value, NotCompared) and call.excinfo.value.untrained


def _is_of(module: object, file: Path) -> bool:
    return getattr(module, "__file__", None) == str(file.absolute())


def _gpus(text: str) -> int:
    if not text.isdecimal() or int(text) not in (2, 4, 8):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs for a first test; give 2, 4 or 8")
    return int(text)


def _named_script(program: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script of a command, as "train.py" or "-m package.train", and its arguments."""
    launcher, _ = launched_by(program)
    words = list(program[len(launcher) :])
    if words and is_python(Path(words[0]).name):
        words = list(after_options(words[1:]))
    if words[:1] in (["-m"], ["--module"]):
        words[:2] = [shlex.join(["-m", *words[1:2]])]
    return (words[0].removeprefix("./"), words[1:]) if words else ("", [])


def fitted_arguments(entry: TrainingScript, user_arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the test's script, among them all of the user, and what they assume."""
    sizes = [] if entry.training_arguments else _sizes(entry, user_arguments)
    others = [(option, row) for row in _ROWS if (option := _fitting(row, entry.options)) is not None]
    words, assumed, fits = list(user_arguments), [], [*sizes, *others]
    documented = {} if words or entry.hydra else _documented_values(entry)
    complete = (it for it in entry.documented if it.arguments and not _UNUSABLE.search(it.arguments))
    if not (words or entry.options or entry.hydra) and (command := next(complete, None)):
        words = command.arguments.split()
        assumed.append(f"its arguments are those of {command.location}")
    if entry.options and not (words or entry.hydra):
        words, location = _launching(entry)
        assumed += [f"it starts its ranks by {shlex.join(words)}, as in {location}"] if words else []
    for option, row in fits:
        if not option.is_in(user_arguments) and (option.name.startswith("--") or entry.hydra):
            words.append(f"{option.name}={row.value}")
            assumed.append(row.assumes.format(option.name))
    rows = {option.name: row for option, row in fits}
    for option in entry.options:
        if option.name.startswith("-") and option.name not in rows and not option.is_in(words):
            value, reason = _value(option, documented)
            if value:
                words += [f"{option.name}={value}"] if option.name.startswith("--") else [option.name, value]
                assumed.append(f"{option.name} is {value}{reason}")
    values = {}
    for option in entry.required:
        if not option.name.startswith("-"):
            fit = rows.get(option.name) or (_OTHER if option.integer else None)
            value, reason = (fit.value, "") if fit else _value(option, documented)
            values[fit.assumes.format(option.name) if fit else f"{option.name} is {value}{reason}"] = value
    if all(values.values()) and all(word.startswith("-") for word in user_arguments):
        words += values.values()
        assumed += values
    devices = next((option.name for option, row in fits if row is _DEVICES), "")
    strategies = [word for word in (*words, *(option.name for option in entry.options)) if ".strategy" in word]
    if entry.hydra and "." in devices and "a Trainer" in entry.parallel and not strategies:
        words.append(f"++{devices.rpartition('.')[0]}.strategy=ddp")
        assumed.append("one device has the strategy ddp too, so that its inputs are those of the ranks")
    if entry.training_arguments and not any("train_batch" in word for word in words):
        words += ["--output_dir=out", f"--per_device_train_batch_size={_DIVIDED}"]
        assumed.append(f"TrainingArguments reads the arguments; {_SAMPLES} samples are divided among all ranks")
    elif not any(row in _SIZES for _, row in fits):
        divides = any(re.fullmatch(_GLOBAL_BATCH.name, variable) for variable in entry.divided)
        reason = "its code does so" if divides else "no argument for its size was found"
        assumed.append(f"the script itself divides a global batch among its ranks: {reason}")
    return words, assumed


def _documented_values(entry: TrainingScript) -> dict[str, tuple[str, str]]:
    """Return argument -> its value in a command of the repository, and the place of the command.
    Commands that train come before others; values that a user is to fill in are left out."""
    options = {spelling: option for option in entry.options for spelling in (option.name, *option.names)}
    values: dict[str, tuple[str, str]] = {}
    for command in sorted(entry.documented, key=lambda command: bool(_NO_TRAINING.search(command.arguments))):
        positional = iter([option for option in entry.required if not option.name.startswith("-")])
        words = iter(_words(command))
        for word in words:
            name, _, value = word.partition("=")
            option = options.get(name) if word.startswith("-") else next(positional, None)
            value = (value or (next(words, "") if option else "")) if word.startswith("-") else word
            if option is not None and value and "<>" not in value:
                values.setdefault(option.name, (value, f", as in {command.location}"))
    return values


def _words(command: Command) -> list[str]:
    """Return the arguments of a command, with "<>" for what a user is to fill in; none if a quotation does not end."""
    try:
        return shlex.split(_PLACEHOLDER.sub("<>", command.arguments))
    except ValueError:
        return []


def _launching(entry: TrainingScript) -> tuple[list[str], str]:
    """Return how a command of the repository lets the script start its ranks on one host, and the command's place."""
    valued = {spelling for option in entry.options for spelling in (option.name, *option.names)}
    for command in entry.documented:
        found, words = list[str](), _words(command)
        for word, following in pairwise([*words, ""]):
            if _LAUNCH.fullmatch(word.partition("=")[0]):
                found += [word, following] if word in valued else [word]
        if found and not re.search(r"<>|world[-_]size[= ](?!1\b)", " ".join(found)):
            return found, command.location
    return [], ""


def _value(option: ScriptArgument, documented: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the value of an argument that no row sets, and where it comes from; "" for none.
    It is that of a command of the repository, if the script needs it, or if it names a file or data."""
    if option.required and _LOCAL_RANK.fullmatch(option.variable):
        return "{r}", ", as launchers pass it"
    value, place = documented.get(option.name, ("", ""))
    is_data = _DATA.fullmatch(option.variable) is not None
    if value and (option.required or (is_data and "/" in value) or Path(value).is_file()):
        return value, place
    if is_data and (option.required or option.unset):
        return "fake_data" if Path("data").exists() else "data", ": missing data are made"
    if _MODEL.fullmatch(option.variable):
        small = (choice for mark in _SMALL for choice in option.choices if re.search(mark, choice.lower()))
        return next(small, ""), ", a small one by its name"
    return "", ""


def _sizes(entry: TrainingScript, user_arguments: Sequence[str]) -> list[tuple[ScriptArgument, _Fit]]:
    """Return the options that set the size of the global batch, each with its row."""
    split = [option for option in entry.options if option.variable in entry.divided]
    of_a_rank = [option for option in entry.options if not option.of_all_ranks]
    accumulated, batch = _fitting(_ACCUMULATION, split), _fitting(_BATCH, of_a_rank)
    if accumulated and batch and not (accumulated.is_in(user_arguments) or batch.is_in(user_arguments)):
        # So that one device, with as many micro-batches as a rank, can be given their samples.
        return [(accumulated, _MICRO_BATCHES), (batch, _BATCH)]
    fits = [
        (accumulated, _ACCUMULATION),
        (_fitting(_GLOBAL_BATCH, split), _GLOBAL_BATCH),
        (batch, _BATCH),
        (_fitting(_GLOBAL_BATCH, entry.options), _GLOBAL_BATCH),
    ]
    return [(option, row) for option, row in fits if option is not None][:1]


def _fitting(row: _Fit, options: Sequence[ScriptArgument]) -> ScriptArgument | None:
    return min(filter(row.fits, options), key=lambda option: len(option.name), default=None)


def _tell(entry: TrainingScript, surveyed: Survey, assumed: Sequence[str], unknown: str | None) -> None:
    print(f"script: {entry.path}, which uses {', '.join(entry.parallel) or 'one device, as far as its source shows'}")
    if not entry.parallel:
        print("  the test fails until ranks share the work, as with DistributedDataParallel")
    others = [str(candidate.path) for candidate in surveyed.entries if candidate.path != entry.path]
    if others:
        remainder = f", and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        print(f"  not chosen: {', '.join(others[:_NAMED])}{remainder}; name one after -- to choose it")
    if command := _documented(entry):
        text = command.arguments
        print(f"  {command.location} starts it with {text if len(text) <= _LONGEST else f'{text[:_LONGEST]}…'}")
    for line in assumed:
        print(f"  assumed: {line}")
    if entry.needs:
        state = "assumed" if _installed(entry.needs) else "MISSING"
        print(f"  {state}: the installed package {entry.needs}, as by pip install -e .")
    if entry.subcommands:
        print("  not read: what each of its subcommands needs; give them after --")
    elif not entry.options:
        print(f"  its arguments are not known: {unknown or 'no parser of them was found'}; give them after --")


def _installed(package: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        # The path starts with the current directory under `python -m mgpu_check`.
        patch.setattr(sys, "path", sys.path[sys.path[0] in ("", str(Path.cwd())) :])
        return package.isidentifier() and importlib.util.find_spec(package) is not None


def _documented(entry: TrainingScript) -> Command | None:
    return next((command for command in entry.documented if command.arguments), None)


def _example(entry: TrainingScript) -> str:
    if command := _documented(entry):
        return command.arguments
    words = [(option.name, option.variable.upper()) for option in entry.required]
    return " ".join(f"{name}={value}" if name.startswith("-") else value for name, value in words) or "--args"


def _missing(entry: TrainingScript, user_arguments: Sequence[str]) -> list[str]:
    positional = sum(not word.startswith("-") for word in user_arguments)
    flags = [option for option in entry.required if option.name.startswith("-")]
    missing = [option.name for option in flags if not option.is_in(user_arguments)]
    return missing + [option.name for option in entry.required if option not in flags][positional:]


def _test(
    started: str, words: Sequence[str], assumed: Sequence[str], autocast: bool, *, fake_data: bool = False
) -> str:
    name = re.sub(r"\W+", "_", re.split(r"[ .]", started)[-1] if started.startswith("-m ") else Path(started).stem)
    arguments = "".join(f"        {json.dumps(word, ensure_ascii=False)},\n" for word in words)
    precision = "        float32=True,\n" if autocast else ""
    made = "        fake_data=True,\n" if fake_data else ""
    comments = "".join(f"    # assumed: {line}\n" for line in assumed)
    text = f'''"""{started} trains the same model on several GPUs as on one. Written by `mgpu-check init`."""

from mgpu_check import assert_script_scales


def test_{name}(ranks):
    # W is the number of ranks. See {_HOW_TO}/compare.md
{comments}    assert_script_scales(
        ranks,
        {json.dumps(started, ensure_ascii=False)},
{arguments}        steps=2,
{precision}{made}    )
'''
    return text.replace("`mgpu-check init`.", f"`mgpu-check init`, {_digest(text)}.", 1)


def _digest(text: str) -> str:
    return hashlib.sha256(_DIGEST.sub("", text, count=1).encode()).hexdigest()[:8]


def _unchanged(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
    except (ValueError, OSError):
        return False
    match = _DIGEST.search(text)
    return match is not None and match[1] == _digest(text)
