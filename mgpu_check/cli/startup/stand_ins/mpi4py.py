"""Stand in for mpi4py in ranks that `mgpu-check compare` starts in place of mpiexec.

MPI itself would find one process, because no launcher of MPI has started the ranks. `MPI.COMM_WORLD` has the ranks of
the comparison, and exchanges pickled objects through its store: enough for scripts whose tensors torch reduces.
"""

from __future__ import annotations

import functools
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_check.processes.launched import STORE, rank_and_world

__all__ = ["MPI"]
__path__: list[str] = []  # so that `import mpi4py.MPI` is an import from a package


_HAS = "rank, size, bcast, scatter, gather, allgather, reduce, allreduce and barrier of MPI.COMM_WORLD"


def _missing(module: str, name: str) -> Any:
    """Raise what the stand-in has, in place of an attribute that it lacks."""
    raise AttributeError(
        f"{module}.{name} is not part of mgpu-check's stand-in for mpi4py, which has {_HAS}; use torch.distributed for "
        "tensors"
    )


__getattr__ = functools.partial(_missing, "mpi4py")


class Communicator:
    """All ranks of the comparison."""

    def __init__(self) -> None:
        self.rank, self.size = rank_and_world()
        self._calls = 0
        self._store: Any = None

    def __getattr__(self, name: str) -> Any:
        return _missing("MPI.COMM_WORLD", name)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, sendobj: Any) -> list[Any]:
        # Late, because scripts may import mpi4py before torch.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

        if self._store is None:
            host, _, port = os.environ[STORE].partition(":")
            self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        self._calls += 1
        self._store.set(f"mpi {self._calls} {self.rank}", pickle.dumps(sendobj))
        return [pickle.loads(self._store.get(f"mpi {self._calls} {rank}")) for rank in range(self.size)]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.allgather(sendobj)
        return found if self.rank == root else None

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        return self.allgather(obj if self.rank == root else None)[root]

    def scatter(self, sendobj: Sequence[Any] | None = None, root: int = 0) -> Any:
        return self.bcast(sendobj, root)[self.rank]

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0) -> Any:
        found = self.allreduce(sendobj, op)
        return found if self.rank == root else None

    def barrier(self) -> None:
        self.allgather(None)

    Barrier = barrier


MPI: Any = types.ModuleType("mpi4py.MPI")
MPI.__getattr__ = functools.partial(_missing, "MPI")
MPI.COMM_WORLD = Communicator()
MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN = operator.add, operator.mul, max, min
sys.modules["mpi4py.MPI"] = MPI
