"""Build the stand-in for CUDA, and run a program on it: ``python tests/standin/building.py --gpus=4 -- COMMAND``.

Depends on nothing but Python, a C compiler and, in the environment that runs it, a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "c"

_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
_WANTED = re.compile(r"(__cuda|cuda[A-Z]|nccl[A-Z]|cublas|cudnn|cufft|cusolver|cusparse)")
_COMPUTES = re.compile(r"(cublas|cudnn|cufft|cusolver|cusparse)")  # their functions may do nothing, as kernels do

CUDA_ERROR_NOT_SUPPORTED = 801
NCCL_INVALID_USAGE = 5


class CannotBuild(RuntimeError):
    """The stand-in cannot be built here; the message says what is missing."""


def is_for_cpus() -> str | None:
    """Return the message for a torch without CUDA, for which CUDA cannot be imitated; None for a CUDA build."""
    try:
        _site_packages()
    except CannotBuild as error:
        return str(error)
    return None


def build(directory: Path | None = None) -> Path:
    """Compile the stand-in, unless it is there; the directory with its libraries.

    Args:
        directory: where to; default one for the user, this torch and these sources in the temporary directory.

    Raises:
        CannotBuild: torch is no CUDA build, or there is no C compiler.
    """
    site, compiler = _site_packages(), _compiler()
    sources = sorted(SOURCES.glob("*.[ch]"))
    if directory is None:
        digest = hashlib.sha256()
        for file in (*sources, Path(__file__), site / "torch" / "version.py"):
            digest.update(file.read_bytes())
        directory = Path(tempfile.gettempdir()) / f"mgpu-check-standin-{os.getuid()}-{digest.hexdigest()[:16]}"
    if (directory / "libstandin.so").exists():
        return directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        work = Path(name)
        files = [str(file) for file in sources if file.suffix == ".c"]
        common = [
            compiler,
            "-O1",
            "-fPIC",
            "-shared",
            "-std=gnu11",
            *(f"-I{directory}" for directory in _headers(site)),
            "-Wall",
            "-Wextra",
            "-Wno-missing-field-initializers",
        ]
        _run([*common, "-o", str(work / "first.so"), *files, "-lpthread", "-ldl"])
        (work / "stubs.c").write_text(_stubs(_undefined(site), _defined(work / "first.so")))
        _run([*common, "-o", str(work / "libstandin.so"), *files, str(work / "stubs.c"), "-lpthread", "-ldl"])
        # One file under three names is loaded once: the runtime, the driver and NVML are of one mind.
        for other in ("libcuda.so.1", "libnvidia-ml.so.1"):
            link = work / other
            link.symlink_to("libstandin.so")
            link.replace(directory / other)
        (work / "libstandin.so").replace(directory / "libstandin.so")
    return directory


def environment(gpus: int, machine: Path, library: Path | None = None, **settings: object) -> dict[str, str]:
    """Return the variables that put a program, and all that it starts, on an imitated machine.

    Args:
        gpus: how many devices the machine has.
        machine: a directory of its own; the processes of this machine share their state there.
        settings: ``init_error=802`` is ``STANDIN_INIT_ERROR=802``; see the README beside this file.
    """
    library = build() if library is None else library
    machine.mkdir(parents=True, exist_ok=True)
    return {
        **preloaded(library),
        "STANDIN_GPUS": str(gpus),
        "STANDIN_DIR": str(machine),
        **{f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()},
    }


def preloaded(library: Path) -> dict[str, str]:
    """Return the variables that let a program find `library` before CUDA's own."""
    return {
        "LD_PRELOAD": str(library / "libstandin.so"),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH", "")])),
    }


def _site_packages() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("the stand-in for CUDA needs torch, which is not installed")
    torch = Path(found.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild(
            "the stand-in for CUDA needs a CUDA build of torch, and this one is for CPUs: run `tox -e cuda`"
        )
    return torch.parent


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if (path := shutil.which(name)) is not None:
            return path
    raise CannotBuild("the stand-in for CUDA needs a C compiler, and finds no cc, gcc or clang: install gcc, or set CC")


def _headers(site: Path) -> list[Path]:
    """Return the directories of the headers of CUDA: first of the version that torch is built for, then triton's."""
    found = [*sorted(site.glob("nvidia/cu*/include")), site / "triton/backends/nvidia/include"]
    if all(any((one / name).exists() for one in found) for name in ("cuda.h", "cuda_runtime_api.h", "crt")):
        return found
    raise CannotBuild(
        f"the stand-in for CUDA needs cuda.h, cuda_runtime_api.h and crt, which the wheels of torch and triton install; "
        f"not all are under {site}"
    )


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _symbols(file: Path, *options: str) -> set[str]:
    lines = _run([os.environ.get("NM", "nm"), "-D", *options, str(file)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def _undefined(site: Path) -> set[str]:
    found = (site / "torch" / "lib" / name for name in _LIBRARIES)
    return {s for file in found if file.exists() for s in _symbols(file, "--undefined-only") if _WANTED.match(s)}


def _defined(file: Path) -> set[str]:
    return _symbols(file, "--defined-only")


def _stubs(wanted: set[str], defined: set[str]) -> str:
    """C for what torch links against and the sources do not have: libraries do nothing; all else refuses, and says
    so."""
    lines = ["void tell(const char *format, ...);"]  # no header: it would know what they really take
    for name in sorted(wanted - defined):
        if _COMPUTES.match(name):
            lines.append(f"long {name}(void) {{ return 0; }}")
        else:
            code = NCCL_INVALID_USAGE if name.startswith("nccl") else CUDA_ERROR_NOT_SUPPORTED
            lines.append(f'long {name}(void) {{ tell("not imitated: {name}"); return {code}; }}')
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command on an imitated machine, which ends with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="standin-") as machine:
        variables: Mapping[str, str] = {**os.environ, **environment(given.gpus, Path(machine))}
        return subprocess.run(given.command, env=dict(variables), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
