"""``mgpu-check simulate``: unmodified scripts, and the processes that they start."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mgpu_check
from mgpu_check.__main__ import main

HOME = Path(mgpu_check.__file__).parent.parent
LAUNCH = (
    f"import sys; sys.path.insert(0, {str(HOME)!r}); from mgpu_check.cli.simulate import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def simulate(cwd, *args):
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, *args], cwd=cwd, capture_output=True, text=True, check=False, timeout=100
    )


def script(folder, name, text):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no program given"),
        (["--gpus=0", "a.py"], "'0' is not a number of GPUs"),
        (["--gpus=four", "a.py"], "'four' is not a number of GPUs"),
        (["--simulate=tpu", "a.py"], "'tpu' is not a backing device"),
        (["--simulate-arithmetic=sums", "a.py"], "no kind of arithmetic is called 'sums'; choose cpu, gpu (all kinds)"),
        (["--backing=cpu", "a.py"], "unrecognized arguments: --backing=cpu"),
        (["--", "-m"], "-m needs the name of a module"),
        (
            ["nowhere.py"],
            "no such script: nowhere.py; name a script, -m and a module, or a program of the PATH such as",
        ),
        (["--", "--verbose"], "unknown option '--verbose'"),
    ],
)
def test_wrong_usage(argv, words, capsys):
    assert main(["simulate", *argv]) == 4
    assert words in capsys.readouterr().err


def test_a_script_runs_as_python_runs_it(tmp_path):
    """Beside another version of the package, which is not used.

    It looks for torch before it imports it, as transformers and datasets do, and its child clears `atexit`, as children
    of multiprocessing do from Python 3.13 on.
    """
    (tmp_path / "mgpu_check").mkdir()
    script(tmp_path / "mgpu_check", "__init__.py", "raise AssertionError('this is another version')")
    script(tmp_path, "neighbour.py", "value = 7")
    script(
        tmp_path,
        "job.py",
        """
        import importlib.util, sys
        spec = importlib.util.find_spec("torch")
        assert "torch" not in sys.modules
        import atexit, gc, os, neighbour, torch
        assert gc.isenabled() and gc.get_freeze_count() > 100_000  # later collections spare the objects of torch
        child = os.fork()
        if not child:
            atexit._clear()
            print(torch.ones(2, device="cuda:1").device, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(__name__, sys.argv[1:], neighbour.value, torch.cuda.device_count(), torch.ones(1).to("cuda:2").device)
        sys.exit(5)
        """,
    )
    done = simulate(tmp_path, "--gpus=3", "--", "job.py", "--lr=1", "x")
    assert done.stdout == "cuda:1\n__main__ ['--lr=1', 'x'] 7 3 cuda:2\n", done.stderr
    assert done.returncode == 5
    assert "SIMULATED" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_module_that_imports_this_package_first_and_masks_devices_and_an_error(tmp_path):
    script(
        tmp_path,
        "job.py",
        """
        from mgpu_check import simulated_node
        import os, torch
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        print(torch.cuda.device_count())
        torch.ones(1, device="cuda:1")
        """,
    )
    done = simulate(tmp_path, "--gpus=2", "-m", "job")
    assert (done.returncode, done.stdout) == (1, "1\n") and "invalid device ordinal" in done.stderr, done.stderr
    assert "sitecustomize" not in done.stderr


def test_a_sitecustomize_of_ones_own_still_runs(tmp_path):
    script(tmp_path, "sitecustomize.py", "import builtins; builtins.mine = 11")
    script(tmp_path, "job.py", "import sys; print(mine, 'torch' in sys.modules)")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, "job.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "11 False\n", done.stderr


WAYS_TO_IMPORT = {
    "a plain import": "import torch",
    "a query before it": "find_spec('torch'); find_spec('torch'); import torch",
    "a query of a submodule": "find_spec('torch.nn'); import torch",
    "a query of the path finder": "PathFinder.find_spec('torch'); import torch",
    "a list of all modules": "list(pkgutil.iter_modules()); import torch.nn",
    "the loader of a query": "find_spec('torch').loader.load_module('torch')",
    "the module of the path finder": "made(PathFinder.find_spec('torch'))",
    "a lazy module": "torch = made(lazy(find_spec('torch'))); assert not acted; torch.nn",
    "no finder but the path finder": "sys.meta_path[:] = [PathFinder]; import torch",
    "finders as before": "before = sys.meta_path[:]; import torch; sys.meta_path[:] = before",
    "a thread": "Thread(target=import_module, args=['torch']).start(); import torch",
    "an import that fails first": "fail(); assert not acted; import torch",
    "a stand-in first": "load('torch', 'stand_in.py'); assert not acted; import torch",
    "a second import": "import torch; reload(torch)",
}
IMPORTER = """
    import json, os, pkgutil, sys, traceback
    from importlib import import_module, reload
    from importlib.machinery import PathFinder
    from importlib.util import LazyLoader, find_spec, module_from_spec, spec_from_file_location
    from threading import Thread

    def made(spec):
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def lazy(spec):
        spec.loader = LazyLoader(spec.loader)
        return spec

    def load(name, file):
        spec = spec_from_file_location(name, file)
        spec.loader.exec_module(module_from_spec(spec))

    def fail():
        os.environ["FAIL"] = "1"
        try:
            import_module("torch")
        except ImportError:
            del os.environ["FAIL"]

    acted = []
    made(spec_from_file_location("startup", sys.argv[1]))._act_after({"torch": [lambda: acted.append("torch" in sys.modules)]})
    for name, way in json.loads(sys.argv[2]).items():
        if not os.fork():
            try:
                exec(way)
            except BaseException:
                traceback.print_exc()
            os.write(1, f"{name}: {acted}\\n".encode())
            os._exit(0)
        os.wait()
"""


def test_a_program_may_import_torch_in_any_way(tmp_path):
    """Torch is a small package here, and each way has a process."""
    (tmp_path / "torch").mkdir()
    script(
        tmp_path / "torch", "__init__.py", "import os\nif 'FAIL' in os.environ: raise ImportError\nfrom torch import nn"
    )
    script(tmp_path / "torch", "nn.py", "")
    script(tmp_path, "stand_in.py", "")
    script(tmp_path, "job.py", IMPORTER)
    words = [str(HOME / "mgpu_check/cli/startup/sitecustomize.py"), json.dumps(WAYS_TO_IMPORT)]
    command = [sys.executable, "job.py", *words]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert ran.stdout.splitlines() == [f"{name}: [True]" for name in WAYS_TO_IMPORT], ran.stderr


@pytest.mark.slow
def test_processes_that_it_starts(tmp_path):
    script(
        tmp_path,
        "job.py",
        """
        import torch, torch.multiprocessing

        def body(i):
            assert torch.ones(1).cuda(i).get_device() == i and torch.cuda.device_count() == 2
            open(f"rank{i}", "w").close()

        class Numbers(torch.utils.data.Dataset):
            def __len__(self): return 2
            def __getitem__(self, i): return torch.cuda.device_count()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(body, nprocs=1)
            print(next(iter(torch.utils.data.DataLoader(Numbers(), 2, num_workers=1))).cuda().tolist())
        """,
    )
    done = simulate(tmp_path, "--gpus=2", "job.py")
    assert (done.returncode, done.stdout) == (0, "[2, 2]\n"), done.stderr
    assert (tmp_path / "rank0").exists()


COUNT = "import os, torch; print(os.environ.get('RANK'), torch.cuda.device_count())"
NOT_SIMULATED = "nothing was simulated: no Python of the program imported torch"


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_a_launcher_of_the_path_starts_pythons_that_are_simulated(tmp_path, monkeypatch):
    """A directory of its name in the current one does not hide it."""
    script(tmp_path, "job.py", COUNT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "mpiexec").mkdir()
    program(
        tmp_path / "bin" / "mpiexec",
        '#!/bin/sh\nshift 2\nfor rank in 0 1; do RANK=$rank "$@" || exit 9; done\nexit 3\n',
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    done = simulate(tmp_path, "--gpus=3", "--", "mpiexec", "-n", "2", sys.executable, "job.py")
    assert (done.returncode, done.stdout) == (3, "0 3\n1 3\n"), done.stderr
    assert "3 GPUs on cpu" in done.stderr and NOT_SIMULATED not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("./train.sh",),
        ("train.sh",),
        ("sh", "train.sh"),
        ("python3", "job.py"),
    ],
    ids=" ".join,
)
def test_a_program_that_is_no_python_script(tmp_path, words):
    script(tmp_path, "job.py", COUNT)
    program(tmp_path / "train.sh", f"#!/bin/sh\nexec {sys.executable} job.py\n")
    done = simulate(tmp_path, "--gpus=3", "--", *words)
    assert (done.returncode, done.stdout) == (0, "None 3\n"), done.stderr


def test_a_program_whose_pythons_are_not_simulated_is_named(tmp_path):
    done = simulate(tmp_path, "--", "sh", "-c", f"{sys.executable} -I -c pass")
    assert done.returncode == 0
    assert NOT_SIMULATED in done.stderr


def test_a_program_that_cannot_be_run(tmp_path):
    program(tmp_path / "train.sh", "#!/no/such/shell\n")
    done = simulate(tmp_path, "--", "./train.sh")
    assert done.returncode == 4
    assert "train.sh cannot be run: No such file or directory" in done.stderr


@pytest.mark.slow
def test_torchrun(tmp_path):
    script(
        tmp_path,
        "train.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("nccl")
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        x = torch.full((1,), rank + 1.0, device="cuda")
        dist.all_reduce(x)
        open(f"rank{rank}", "w").write(str(x.item()))
        dist.destroy_process_group()
        """,
    )
    run = ["torchrun", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = simulate(tmp_path, "--gpus=2", "--", *run, "train.py")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{i}").read_text() for i in range(2)] == ["3.0", "3.0"]
