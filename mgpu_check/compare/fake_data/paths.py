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
from typing import Any

from mgpu_check.compare.fake_data import evidence, forms
from mgpu_check.compare.fake_data.forms import FORMS, Maker, Request
from mgpu_check.torch_hooks.patches import Patches, around

VARIABLE = "_MGPU_CHECK_FAKE_DATA"
"""The variable of a script's processes with the shared directory and the working directory of the run, as JSON."""
_OUTSIDE = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", f"{sys.prefix}/lib", f"{sys.base_prefix}/lib")
_HIDDEN = re.compile(r"/\.[^/]")


_OF_TORCH = (".pt", ".pth", ".ckpt", ".pkl", ".bin")


class Area:
    """The directory of made data, as one process of a script uses it.

    `install` makes one at the start of the process. The replaced functions, and those of `libraries`, ask it for paths.
    """

    def __init__(self, root: str, here: str) -> None:
        self.root, self.here = os.path.realpath(root), here
        with open(os.path.join(root, "plan.json"), encoding="utf-8") as file:
            self.plan: Mapping[str, dict[str, Any]] = json.load(file)
        self._local = threading.local()
        self._known: set[str] = set()  # made paths that this process has asked for

    @property
    def busy(self) -> bool:
        """Whether this thread makes data: then the functions that a maker calls use real paths."""
        return getattr(self._local, "busy", False)

    def name_of(self, path: str) -> str:
        """Return the name of a path that is the same in all runs: relative to the directory where the script began."""
        absolute = os.path.abspath(path)
        inside = absolute.startswith((self.here + os.sep, os.path.dirname(self.here) + os.sep))
        return os.path.relpath(absolute, self.here) if inside else absolute

    def target(self, name: str) -> str:
        """Return where the data of a name is, or would be, made."""
        parts = ["beside" if part == ".." else part for part in name.split(os.sep)]
        return os.path.join(self.root, "files", "root" if os.path.isabs(name) else "here", *filter(None, parts))

    def note(self, kind: str, request: Request, form: str, options: Mapping[str, Any], do: str = "") -> None:
        """Append a line to the notes, which the command reads: what was made, or (`kind` is "missing") was not."""
        line = f"{request.file.removeprefix(self.here + os.sep)}:{request.line}"
        entry = {"kind": kind, "name": request.name, "form": form, "options": options, "call": request.call}
        with open(os.path.join(self.root, "notes"), "a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "line": line, "do": do}) + "\n")

    def request(self, name: str, call: str, hints: Mapping[str, Any] | None = None) -> Request | None:
        """Return the request of the user's code for a name; None if no code of the user asks."""
        frame = evidence.calling_frame()
        return frame and Request(name, call, frame.f_code.co_filename, frame.f_lineno, hints or {})

    def made(self, target: str, request: Request, kind: str, form: str, maker: Maker) -> str | None:
        """Make the data of a request at `target`, unless another process has. Return `target`, or None on failure."""
        self._local.busy = True
        os.makedirs(os.path.dirname(target), exist_ok=True)
        base, suffix = os.path.splitext(target)
        options, draft = dict(self.plan.get(request.name, {})), f"{base}.draft{suffix}"
        try:
            with open(os.path.join(self.root, "lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.lexists(target):
                    maker(draft, request, options)
                    os.rename(draft, target)
                    self.note(kind, request, form, options)
        except Exception as error:
            shutil.rmtree(draft, ignore_errors=True)
            reason = f"{form} could not be made: {type(error).__name__}: {error}"
            self.note("missing", request, reason, {}, "give the file, or install what it needs")
            return None
        finally:
            self._local.busy = False
        self._known.add(target)
        return target

    def find(self, path: Any, call: str, hints: Mapping[str, Any] | None = None, directory: bool = False) -> str | None:
        """Return the made path in place of one that does not exist; None if it is not data of the script."""
        if self.busy or not isinstance(path, (str, bytes, os.PathLike)):
            return None
        text = os.fsdecode(path)
        name = self.name_of(text)
        # Scripts use hidden directories and those of libraries for other things than data.
        absolute = os.path.abspath(text)
        if not text or text.startswith("~") or _HIDDEN.search(name) or absolute.startswith((self.root, *_OUTSIDE)):
            return None
        installed = (os.path.join(os.path.abspath(entry), "") for entry in sys.path)
        if any(absolute.startswith(entry) and not (self.here + os.sep).startswith(entry) for entry in installed):
            return None  # of a package elsewhere, such as its entry points
        target = self.target(name)
        if os.path.lexists(target):
            self._known.add(target)
            return target
        request = self.request(name, call, hints)
        if request is None or evidence.is_handled() or (directory and evidence.is_globbed()):
            return None
        plan, form = self.plan.get(name, {}), forms.form_of(name)
        if directory:
            suffix = plan.get("suffix") or request.hints.get("suffix") or forms.suffix_in(request.file)
            form = ("files", forms.tree) if suffix else None
        elif plan:
            form = FORMS.get(plan.get("form") or os.path.splitext(name)[1])
        if form is None:
            thing, option = ("directory, or its files", "suffix") if directory else ("file, or its form", "form")
            do = f"give the {thing} in --fake-data=plan.toml: [{json.dumps(name)}] {option}='.txt'"
            if name.endswith(_OF_TORCH):
                do = "give the file, as torch.save writes it: nothing shows which tensors it has"
            self.note("missing", request, "its name and its use do not show its form", {}, do)
            return None
        return self.made(target, request, "directory" if directory else "file", *form)

    def matched(self, pattern: str, call: str) -> str | None:
        """Return the pattern of made files in place of one that no file matches; None if it names no form."""
        name = self.name_of(pattern)
        parts = name.split(os.sep)
        first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        root, inner, suffix = os.sep.join(parts[:first]), os.sep.join(parts[first:]), os.path.splitext(name)[1]
        hints = {"pattern": inner, "suffix": suffix, "classes": 4}
        request = None if self.busy or _HIDDEN.search(name) else self.request(root, call, hints)
        has_form = forms.form_of(parts[-1].replace("*", "0")) is not None
        if not has_form or request is None or not root or re.search(r"[\[?{]", inner):
            return None
        made = self.made(self.target(root), request, "directory", f"files {inner}", forms.tree)
        return made and os.path.join(made, inner)

    def exists(self, path: Any) -> str | None:
        """Return a path to ask about in place of one that does not exist: the made one, if this process has asked for
        it, or one that exists, if the script would otherwise end; else None."""
        for frame in evidence.frames():
            if evidence.is_of_user(frame.f_code.co_filename):
                break
            if self.busy or "-packages" in frame.f_code.co_filename:
                return None  # a library asks
        else:
            return None
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        name = self.name_of(os.fsdecode(path))
        target = self.target(name)
        if any(target == known or target.startswith(known + os.sep) for known in self._known):
            return target
        return "" if evidence.is_demanded(frame) else None


def _open(area: Area, original: Any, file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
    reads = isinstance(mode, str) and "r" in mode
    find = functools.partial(area.find, call="open") if reads else lambda path: None
    return _retry(find, original, file, mode, *rest, **named)


def _retry(find: Callable[[Any], str | None], original: Any, path: Any = ".", *rest: Any, **named: Any) -> Any:
    """Call a function of a path, again with the made path if it does not exist."""
    try:
        return original(path, *rest, **named)
    except (FileNotFoundError, NotADirectoryError):
        if (made := find(path)) is None:
            raise
    return original(made, *rest, **named)


def _glob(area: Area, call: str, original: Any, *where: Any, **named: Any) -> Iterator[Any]:
    """Replace ``glob.iglob(pattern)``, or a method of a path: its arguments are the path and the pattern."""
    paths = list(original(*where, **named))
    pattern = os.path.join(*where[:-1], "**" if call == "rglob" else "", os.fsdecode(where[-1]))
    if not paths and named.get("root_dir") is None and (made := area.matched(pattern, call)):
        paths = [type(where[0])(file) for file in sorted(glob.glob(made, recursive=True))]
    return iter(paths)


def _exists(area: Area, original: Any, path: Any, **named: Any) -> bool:
    if original(path, **named):
        return True
    other = area.exists(path)
    return other == "" or (other is not None and original(type(path)(other), **named))


def _address(area: Area, original: Any, host: Any, *rest: Any, **named: Any) -> Any:
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
        patches.wrap(owner, name, around(functools.partial(new, *arguments)))

    opened = around(functools.partial(_open, area))(io.open)
    for module in (builtins, io):
        patches.set(module, "open", opened)
    for name in ("listdir", "scandir"):
        wrap(os, name, _retry, functools.partial(area.find, call=name, directory=True))
    wrap(os.path, "getsize", _retry, functools.partial(area.find, call="getsize"))
    wrap(glob, "iglob", _glob, area, "glob")  # which glob.glob calls
    for name in ("glob", "rglob"):
        wrap(pathlib.Path, name, _glob, area, name)
    for name in ("exists", "isfile", "isdir"):
        wrap(os.path, name, _exists, area)
    for name in ("exists", "is_file", "is_dir"):
        wrap(pathlib.Path, name, _exists, area)
    wrap(socket, "getaddrinfo", _address, area)
    return libraries.rows(area)
