"""Watch the processes of a run: the collectives that each has entered, and ranks that the script starts itself.

On real devices a collective returns at once, and a rank waits later, for example in ``loss.item()``. The runner reads
the counts of entered collectives while the process hangs, to name the rank that the others wait for.

The script may start processes by any means: `multiprocessing`, `subprocess`, a launcher, Ray. Each new Python runs
`cli/startup/sitecustomize.py`, which installs the watch there. A process that makes a process group is a rank; others,
such as workers of loaders, stay unrecorded. It opens its files by their descriptors in the runner, which need not be
inherited.

Imports no torch: the runner, and such a process, may do without.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.processes import collective_records
from mgpu_check.processes.environments import PLACE
from mgpu_check.torch_hooks.patches import Patches, around

if TYPE_CHECKING:
    from mgpu_check.compare.in_script.recorder import ScriptRecorder

_NUMBER = struct.Struct("=Q")


def install_count(fd: int) -> Callable[[], None]:
    """Record each collective that the script's process enters in the file `fd`. Return a function that also records the
    operations that the C++ reducer of DistributedDataParallel has entered so far."""
    from mgpu_check.engine.rank_side.state import operations
    from mgpu_check.torch_hooks import collectives

    collectives.recorder.attach(fd)
    collectives.install()

    def count() -> None:
        os.pwrite(fd, _NUMBER.pack(operations()), collective_records.SIZE)

    return count


def entered(fd: int) -> tuple[int, int]:
    """Read from the file of a process how many operations and collectives it has entered.

    Return the number of operations that the backends of the default group had counted when it was last written, with
    those of DistributedDataParallel's C++ reducer, and the current number of calls of collectives, in any group. Each
    is 0 until the process has written it.
    """
    data = os.pread(fd, collective_records.SIZE + _NUMBER.size, 0)
    number = data[collective_records.SIZE :]
    return (_NUMBER.unpack(number)[0] if number else 0), collective_records.parse(data[: collective_records.SIZE]).total


Record = Callable[[Mapping[str, int]], "ScriptRecorder"]


def files_of(runner: int, files: Mapping[str, int]) -> dict[str, int]:
    """Open files of the process `runner` by their descriptors there. Raises `OSError` if it has ended."""
    opened = {}
    for name, fd in files.items():
        mode = os.O_RDWR | (os.O_APPEND if name == "trace" else 0)
        opened[name] = os.open(f"/proc/{runner}/fd/{fd}", mode | os.O_CLOEXEC)
    return opened


def group_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of ranks that a call of `init_process_group` with these arguments asks for."""
    size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
    return int(os.environ.get("WORLD_SIZE", 1)) if size in (-1, None) else int(size)


def install_rank_watch(ranks: Sequence[Mapping[str, int]], size: int, record: Record, meets: bool) -> None:
    """Record a process that the script starts, once it is known to be a rank; call it after torch is imported.

    A rank makes a process group, or, on one device, trains without one. If the script starts other ranks than
    expected, the trace of rank 0 receives "starts".

    Args:
        ranks: the files of each rank.
        size: number of ranks that the script may start; 0 if the runner has started them.
        record: records this process in the files of a rank.
        meets: ranks meet at the store of the runner, so that the number of ranks is compared before they wait there.
    """
    from torch.distributed import is_available
    from torch.nn.modules.module import register_module_forward_pre_hook

    from mgpu_check.compare.in_script.script_calls import trains_alone

    patches = Patches(sparing="mgpu_check")
    undo = contextlib.ExitStack()

    def take_over(rank: int, world: int) -> ScriptRecorder:
        undo.close()
        os.environ[PLACE] = f"{rank}/{world}"
        recorder = record(ranks[rank if rank < len(ranks) else 0])
        if world != size or not recorder.take_over():
            recorder.wait("starts", size=world)
        return recorder

    def make_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from torch import distributed

        if meets and (asked := group_size(args, kwargs)) != size:
            take_over(0, asked)
        original(*args, **kwargs)
        rank, world = distributed.get_rank(), distributed.get_world_size()
        take_over(rank, world).note("group", size=world, rank=rank)

    def enter(module: Any, args: Any) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and module.training and trains_alone(module):
            take_over(0, 1).enter(module, args)

    if is_available():
        from torch.distributed import distributed_c10d as c10d

        patches.replace(c10d.init_process_group, around(make_group)(c10d.init_process_group))
    patches.apply()
    undo.callback(patches.undo)
    if size == 1:
        undo.callback(register_module_forward_pre_hook(enter).remove)
