"""A trivial test, one `all_reduce` on 4 ranks, as each harness runs it. See ``engine.py``."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Each file of tests is run in a directory with this conftest: it notes when each test began and ended. Several
# processes may load it, and the first one notes.
CONFTEST = """
import json, os, pathlib, time

LOG = os.environ["BENCH_LOG"]

try:
    os.close(os.open(LOG + ".claimed", os.O_CREAT | os.O_EXCL))
    NOTES = True
except FileExistsError:
    NOTES = False

def note(**what):
    if NOTES:
        with open(LOG, "a") as file:
            file.write(json.dumps({"time": time.time(), **what}) + "\\n")

def fields(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

def root(pid):
    parent = int(fields(pid)[1])
    return pid if parent == int(os.environ["BENCH_PID"]) else root(parent)

def processor_time(pid):
    ended = sum(map(int, fields(pid)[13:15])) / os.sysconf("SC_CLK_TCK")
    threads = [*pathlib.Path(f"/proc/{pid}/task").iterdir()]
    own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    return own + ended + sum(map(processor_time, children))

ends = []

def pytest_collection_finish(session): ends[:] = [item.nodeid for item in session.items[:1] + session.items[-1:]]
def pytest_runtest_logstart(nodeid): note(event="start", test=nodeid.rpartition("::")[2])
def pytest_runtest_logfinish(nodeid):
    note(event="end", test=nodeid.rpartition("::")[2])
    if NOTES and nodeid in ends: note(event="processors", seconds=processor_time(root(os.getpid())))
def pytest_runtest_logreport(report):
    if report.failed: note(event="failed", test=report.nodeid.rpartition("::")[2])
"""

# The hooks for `DistributedTest` in DeepSpeed's tests/conftest.py.
HOOKS = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True

def pytest_runtest_teardown(item, nextitem):
    if getattr(item.cls, "reuse_dist_env", False) and not nextitem:
        for size, pool in item.cls._pool_cache.items():
            item.cls()._close_pool(pool, size, force=True)
"""

TRIVIAL = """
    x = torch.ones(3) * (%s + 1)
    dist.all_reduce(x)
    assert x[0] == 10
"""

# The end of a class of torch's harnesses, which find tests by name.
IN_CLASS = textwrap.indent(TRIVIAL % "self.rank", "    ")
NUMBERED = """
for i in range({count}):
    setattr(%s, f"test_all_reduce_{{i:02d}}", lambda self: self.body())
"""

OURS = (
    """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(4)
@pytest.mark.parametrize("i", range({count}))
def test_all_reduce(rank, i):
"""
    + TRIVIAL % "rank.index"
)

SPAWNED = (
    """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestSpawned(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def body(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 4), rank=self.rank, world_size=4)
"""
    + IN_CLASS
    + NUMBERED % "TestSpawned"
)

CONTINUOUS = (
    """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestContinuous(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls): return "gloo"

    @classmethod
    def device_type(cls): return "cpu"

    def body(self):
"""
    + IN_CLASS
    + NUMBERED % "TestContinuous"
)

# The steps of `DistributedTest` in DeepSpeed's tests/unit/common.py, in its order and with its pause, without the
# import of deepspeed: a pool of processes by forkserver, a file store, a barrier, the test, the end of the group.
POOLED = """
import tempfile, time, pytest, torch, torch.distributed as dist, torch.multiprocessing as mp

class DistributedTest:
    is_dist_test = True
    reuse_dist_env = False
    _pool_cache = {{}}

    def __call__(self, request):
        self._test = getattr(self, request.function.__name__)
        self._arguments = {{"i": request.getfixturevalue("i")}}
        with tempfile.NamedTemporaryFile(delete=False, dir=request.getfixturevalue("tmpdir")) as file:
            store = f"file://{{file.name}}"
        mp.set_start_method("forkserver", force=True)
        pool = self._pool_cache.get(4) or mp.Pool(4)
        if self.reuse_dist_env:
            self._pool_cache[4] = pool
        try:
            pool.starmap_async(self._dist_run, [(rank, store) for rank in range(4)]).get(600)
        finally:
            self._close_pool(pool, 4)
        time.sleep(0.5)

    def _dist_run(self, rank, store):
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
            dist.barrier()
        self._test(**self._arguments)

    def _dist_destroy(self):
        dist.barrier()
        dist.destroy_process_group()

    def _close_pool(self, pool, size, force=False):
        if force or not self.reuse_dist_env:
            pool.starmap(self._dist_destroy, [() for _ in range(size)])
            pool.close()
            pool.join()

@pytest.mark.parametrize("i", range({count}))
class TestPooled(DistributedTest):
    reuse_dist_env = %s

    def test_all_reduce(self, i):
        x = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        assert x[0] == 10
"""

# torch.distributed needs a group of its own in the processes that MPI starts.
IN_MPI = """
import tempfile, pytest, torch, torch.distributed as dist

def grouped(comm):
    if not dist.is_initialized():
        file = comm.bcast(tempfile.mktemp() if comm.rank == 0 else None)
        dist.init_process_group("gloo", store=dist.FileStore(file, 4), rank=comm.rank, world_size=4)
"""

ISOLATED = (
    IN_MPI
    + """
@pytest.mark.mpi(ranks=4, timeout=60)
@pytest.mark.parametrize("i", range({count}))
def test_all_reduce(mpi_ranks, comm, i):
    grouped(comm)
"""
    + TRIVIAL % "comm.rank"
)

PARALLEL = (
    IN_MPI
    + """
@pytest.mark.parallel(4)
@pytest.mark.parametrize("i", range({count}))
def test_all_reduce(i):
    from mpi4py import MPI
    grouped(MPI.COMM_WORLD)
"""
    + TRIVIAL % "MPI.COMM_WORLD.rank"
)


@dataclass(frozen=True)
class Harness:
    """How to run a number of equal tests.

    Attributes:
        source: of the test file, with the place `count`.
        count: tests; few where each takes seconds.
        plugin: of pytest. No other plugin is loaded.
        arguments: of pytest.
        warm_up: the arguments of a run before it, in the same directory; empty for none.
        ranks: processes of pytest that mpiexec starts; 0 without mpiexec.
        hooks: for the conftest.
        needs: modules.
    """

    source: str
    count: int
    plugin: str = ""
    arguments: tuple[str, ...] = ()
    warm_up: tuple[str, ...] = ()
    ranks: int = 0
    hooks: str = ""
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]

    def before(self) -> list[str]:
        return [mpiexec(), "-n", str(self.ranks)] if self.ranks else []


def mpiexec() -> str:
    """Return the mpiexec of this environment, else that of PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


QUIET = ("-W", "ignore")
TORCH = {"arguments": QUIET, "needs": ("expecttest",)}
ISOLATE = {"plugin": "pytest_isolate_mpi._plugin", "needs": ("pytest_isolate_mpi", "mpi4py")}
PYTEST_MPI = {"plugin": "pytest_mpi.plugin", "needs": ("pytest_mpi", "mpi4py")}
IN_ONE = {"plugin": "xdist.plugin,pytest_mpi.plugin", "needs": ("xdist", "pytest_mpi", "mpi4py")}
"""In one mpiexec, mpi-pytest asks for an option of pytest-xdist if that is installed."""

PLUGIN, NODE = "mgpu_check.plugin.plugin", ("--gpus=4", "--simulate")
KEPT, END = (*NODE, "--gpu-keep-warm"), (*NODE, "--gpu-keep-warm=0")

HARNESSES = {
    "mgpu-check": Harness(OURS, 40, PLUGIN, NODE),
    "mgpu-check, second run with --gpu-keep-warm": Harness(OURS, 40, PLUGIN, END, KEPT),
    "torch MultiProcContinuousTest": Harness(CONTINUOUS, 40, **TORCH),
    "torch MultiProcessTestCase": Harness(SPAWNED, 3, **TORCH),
    "DeepSpeed DistributedTest, reuse_dist_env": Harness(POOLED % True, 20, hooks=HOOKS),
    "DeepSpeed DistributedTest": Harness(POOLED % False, 3, hooks=HOOKS),
    "mpi-pytest in one mpiexec": Harness(PARALLEL, 40, **IN_ONE, ranks=4),
    "mpi-pytest": Harness(PARALLEL, 3, **PYTEST_MPI),
    "pytest-isolate-mpi": Harness(ISOLATED, 3, **ISOLATE),
}
