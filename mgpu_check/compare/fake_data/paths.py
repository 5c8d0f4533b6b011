"""Redirect paths that a script reads, and that do not exist, to files that are made for them.

`install` replaces the functions of Python that open and list files. They try the real path first. Only a path that the
user's code asks for is made, once, in a directory that all runs and ranks of a comparison share. Other processes wait
for it. ``os.path.exists`` stays false for a path until this process has read or listed it, because scripts ask it
whether to resume, or to download. It is true at once if the script would otherwise end.
"""

from __future__ import annotations

import builtins
import fcntl
import functools
import glob
import io
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mgpu_check.compare.fake_data import evidence, forms
from mgpu_check.compare.fake_data.forms import FORMS, Maker, Request
from mgpu_check.torch_hooks.patches import Patches, around

VARIABLE = "_MGPU_CHECK_FAKE_DATA"
"""The variable of a script's processes with the shared directory and the working directory of the run, as JSON."""
_OUTSIDE = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", f"{sys.prefix}/lib", f"{sys.base_prefix}/lib")
_HIDDEN = re.compile(r"/\.[^/]")


class Area:
    """The directory of made data, as one process of a script uses it.

    `install` makes one at the start of the process. The replaced functions, and those of `libraries`, ask it for paths.
    """

    def __init__(self, root: str, here: str) -> None:
        self.root, self.here = os.path.realpath(root), here
        with open(os.path.join(root, "plan.json"), encoding="utf-8") as file:
            self.plan: Mapping[str, dict[str, Any]] = json.load(file)
        self._busy = threading.local()
        self._known: set[str] = set()  # made paths that this process has asked for

    def name_of(self, path: str) -> str:
        """Return the name of a path that is the same in all runs: relative to the directory where the script began."""
        absolute = os.path.abspath(path)
        inside = absolute.startswith((self.here + os.sep, os.path.dirname(self.here) + os.sep))
        return os.path.relpath(absolute, self.here) if inside else absolute

    def target(self, name: str) -> str:
        """Return where the data of a name is, or would be, made."""
        parts = ["beside" if part == ".." else part for part in name.split(os.sep)]
        return os.path.join(self.root, "files", "root" if os.path.isabs(name) else "here", *filter(None, parts))

    def shown(self, file: str) -> str:
        return os.path.relpath(file, self.here) if file.startswith(self.here + os.sep) else file

    def note(self, kind: str, request: Request, form: str, options: Mapping[str, Any], do: str = "") -> None:
        """Append a line to the notes, which the command reads: what was made, or (`kind` is "missing") was not."""
        line = f"{self.shown(request.file)}:{request.line}"
        entry = {"kind": kind, "name": request.name, "form": form, "options": options, "call": request.call}
        with open(os.path.join(self.root, "notes"), "a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "line": line, "do": do}) + "\n")

    def request(self, name: str, call: str, hints: Mapping[str, Any] | None = None) -> Request | None:
        frame = evidence.calling_frame()
        return frame and Request(name, call, frame.f_code.co_filename, frame.f_lineno, hints or {})

    @contextmanager
    def making(self) -> Iterator[None]:
        """Let the functions that a maker calls use real paths."""
        before, self._busy.on = self.busy, True
        try:
            yield
        finally:
            self._busy.on = before

    @property
    def busy(self) -> bool:
        return getattr(self._busy, "on", False)

    @contextmanager
    def hinting(self, hints: Mapping[str, Any]) -> Iterator[None]:
        """Let `hints` show the form of files that are opened within."""
        before, self._busy.hints = self.hints, hints
        try:
            yield
        finally:
            self._busy.hints = before

    @property
    def hints(self) -> Mapping[str, Any]:
        return getattr(self._busy, "hints", {})

    def made(self, target: str, request: Request, kind: str, form: str, maker: Maker) -> str | None:
        """Make the data of a request at `target`, unless another process has. Return `target`, or None on failure."""
        with self.making():
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(os.path.join(self.root, "lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.lexists(target):
                    base, suffix = os.path.splitext(target)
                    options, draft = dict(self.plan.get(request.name, {})), f"{base}.draft{suffix}"
                    try:
                        maker(draft, request, options)
                        os.rename(draft, target)
                        self.note(kind, request, form, options)
                    except Exception as error:
                        shutil.rmtree(draft, ignore_errors=True)
                        reason = f"{form} could not be made: {type(error).__name__}: {error}"
                        self.note("missing", request, reason, {}, "give the file, or install what it needs")
                        return None
        self._known.add(target)
        return target

    def find(self, path: Any, call: str, hints: Mapping[str, Any] | None = None, directory: bool = False) -> str | None:
        """Return the made path in place of one that does not exist; None if it is not data of the script."""
        if self.busy or not isinstance(path, (str, bytes, os.PathLike)):
            return None
        text = os.fsdecode(path)
        absolute, name = os.path.abspath(text), self.name_of(text)
        # Scripts use hidden directories and those of libraries for other things than data.
        if absolute.startswith((self.root, *_OUTSIDE)) or _HIDDEN.search(name) or text.startswith("~"):
            return None
        target = self.target(name)
        if os.path.lexists(target):
            self._known.add(target)
            return target
        request = self.request(name, call, hints)
        if request is None or evidence.is_handled():
            return None
        plan = self.plan.get(name, {})
        if directory:
            maker = forms.tree_of(request) or (forms.tree if "suffix" in plan else None)
            kind, shape = "directory", "files in directories of classes" if request.hints["classes"] else "files"
            do = f"give the directory, or its files in --fake-data=plan.toml: [{json.dumps(name)}] suffix='.png'"
        else:
            wanted = plan.get("form") or (plan and os.path.splitext(name)[1])
            shape, maker = (FORMS.get(wanted) if wanted else forms.form_of(name)) or ("", None)
            kind, do = (
                "file",
                f"give the file, or its form in --fake-data=plan.toml: [{json.dumps(name)}] form='.txt'",
            )
        if maker is None:
            self.note("missing", request, "its name and its use do not show its form", {}, do)
            return None
        return self.made(target, request, kind, shape, maker)

    def listed(self, path: Any, call: str) -> str | None:
        """Return the made directory in place of one that does not exist."""
        frame = evidence.calling_frame()
        nested = frame is not None and evidence.lists_classes(frame.f_code.co_filename)
        return self.find(path, call, {"classes": 4 if nested else 0}, directory=True)

    def matched(self, pattern: str, call: str) -> str | None:
        """Return the pattern of made files in place of one that no file matches; None if it names no form."""
        name = self.name_of(pattern)
        parts = name.split(os.sep)
        first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        directories = [part for part in parts[first:-1] if part != "**"]
        form = forms.form_of(parts[-1].replace("*", "0"))
        request = None if self.busy or _HIDDEN.search(name) else self.request(name, call)
        root = os.sep.join(parts[:first])
        if form is None or request is None or not root or re.search(r"[\[?{]", "".join(parts[first:])):
            return None

        def fill(path: str, request: Request, options: dict[str, Any]) -> None:
            for row in range(options.setdefault("samples", forms.files_of(parts[-1]))):
                inner = [part.replace("*", f"class_{row % 4}") for part in directories]
                file = parts[-1].replace("*", f"{row:05}")
                os.makedirs(os.path.join(path, *inner), exist_ok=True)
                own = Request(f"{root}/{row}", call, request.file, request.line)
                form[1](os.path.join(path, *inner, file), own, {})

        target = self.target(root)
        own = Request(root, call, request.file, request.line)
        made = self.made(target, own, "directory", f"files {os.sep.join(parts[first:])}", fill)
        return made and os.path.join(made, *parts[first:])

    def exists(self, original: Callable[[Any], bool], path: Any) -> bool:
        """Return whether a path exists, or was made and asked for, or must exist for the script to continue."""
        if original(path) or self.busy:
            return original(path)
        frame = sys._getframe(1)
        while frame.f_back is not None and not evidence.is_of_user(frame):
            if "-packages" in frame.f_code.co_filename:
                return False  # a library asks
            frame = frame.f_back
        try:
            name = self.name_of(os.fsdecode(path))
        except TypeError:
            return False
        target = self.target(name)
        if any(target == known or target.startswith(known + os.sep) for known in self._known):
            return original(target)
        return evidence.is_of_user(frame) and not forms.may_be_state(name) and evidence.is_demanded(frame)


def _open(area: Area, original: Any, file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
    try:
        return original(file, mode, *rest, **named)
    except (FileNotFoundError, NotADirectoryError):
        reads = isinstance(mode, str) and mode.startswith(("r", "b", "t")) and "w" not in mode
        made = area.find(file, "open", area.hints) if reads else None
        if made is None:
            raise
    return original(made, mode.replace("+", ""), *rest, **named)


def _list(area: Area, call: str, original: Any, path: Any = ".", *rest: Any) -> Any:
    try:
        return original(path, *rest)
    except (FileNotFoundError, NotADirectoryError):
        made = area.listed(path, call)
        if made is None:
            raise
    return original(made, *rest)


def _glob(area: Area, original: Any, pattern: Any, **named: Any) -> Iterator[Any]:
    paths = list(original(pattern, **named))
    within = named.get("root_dir")
    if not paths and within is None and (made := area.matched(os.fsdecode(pattern), "glob")):
        paths = sorted(original(made, **named))
    return iter(paths)


def _path_glob(area: Area, call: str, original: Any, path: Any, pattern: str, **named: Any) -> Iterator[Any]:
    paths = list(original(path, pattern, **named))
    deep = f"**/{pattern}" if call == "rglob" else pattern
    if not paths and (made := area.matched(os.path.join(path, deep), call)):
        paths = [type(path)(file) for file in sorted(glob.glob(made, recursive=True))]
    return iter(paths)


def _size(area: Area, original: Any, path: Any) -> Any:
    try:
        return original(path)
    except FileNotFoundError:
        made = area.find(path, "getsize")
        if made is None:
            raise
    return original(made)


def _exists(area: Area, original: Any, path: Any, **named: Any) -> bool:
    kind = pathlib.Path if isinstance(path, pathlib.Path) else lambda it: it
    return area.exists(lambda it: original(kind(it), **named), path)


def _address(original: Any, host: Any, *rest: Any, **named: Any) -> Any:
    """Fail at once for another host, in place of attempts that time out."""
    text = host.decode() if isinstance(host, bytes) else host
    if text and not re.fullmatch(r"localhost|[\d.]+|[\da-fA-F:]*:[\da-fA-F:.]*", text) and text != socket.gethostname():
        raise socket.gaierror(socket.EAI_AGAIN, f"{text}: --fake-data uses no network")
    return original(host, *rest, **named)


def install() -> dict[str, Callable[[], None]]:
    """Replace the functions of Python that open files. Return module -> what to do when it is imported."""
    from mgpu_check.compare.fake_data import libraries

    root, here = json.loads(os.environ[VARIABLE])
    here = here or os.getcwd()
    os.environ[VARIABLE] = json.dumps([root, here])  # for processes that start elsewhere
    area, patches = Area(root, here), Patches()

    def wrap(owner: Any, name: str, new: Callable[..., Any], *arguments: Any) -> None:
        if hasattr(owner, name):
            patches.wrap(owner, name, around(functools.partial(new, area, *arguments)))

    opened = around(functools.partial(_open, area))(io.open)
    for module in (builtins, io):
        patches.set(module, "open", opened)
    for name in ("listdir", "scandir"):
        wrap(os, name, _list, name)
    wrap(glob, "iglob", _glob)  # which glob.glob calls
    for name in ("glob", "rglob"):
        wrap(pathlib.Path, name, _path_glob, name)
    for name in ("exists", "isfile", "isdir"):
        wrap(os.path, name, _exists)
    for name in ("exists", "is_file", "is_dir"):
        wrap(pathlib.Path, name, _exists)
    wrap(os.path, "getsize", _size)
    patches.wrap(socket, "getaddrinfo", around(_address))
    return libraries.rows(area)
