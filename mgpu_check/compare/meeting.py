"""Make ranks meet at the store of this comparison, even if the script sets another address.

Each rank is launched as by torchrun, whose agent holds the store, so no rank creates one. A rank that tries to reach
the store at another address would wait until it times out.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mgpu_check.compare.watched import Note
from mgpu_check.processes.python_environment import rank_and_world
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.patches import Patches

_LOCAL = ("localhost", "127.0.0.1", "::1")

Places = Mapping[str, tuple[str, int]]
"""Environment variable -> file and line that set it."""


def install(note: Note, store: tuple[str, int], places: Places) -> None:
    """Redirect the ranks of the whole group to `store`; record "led" if the script set another address.

    Args:
        places: filled while the script sets variables, and read when the script makes the group.
    """
    if not torch.distributed.is_available():
        return
    # Imported by name: the package also has a function `rendezvous`, which hides the module.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    ours = rank_and_world()
    original: Callable[..., Any] = rendezvous._create_c10d_store

    @functools.wraps(original)
    def led(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        there = port == store[1] and hostname in _LOCAL
        if not there and (rank, world_size) == ours and rendezvous._torchelastic_use_agent_store():
            meant = {"MASTER_PORT": (port, store[1]), "MASTER_ADDR": (hostname, store[0])}
            changed = [name for name, (own, given) in meant.items() if own != given]
            variable = next((name for name in changed if os.environ.get(name) == str(meant[name][0])), None)
            file, line = places.get(variable or "") or calling_line()
            note("led", address=f"{hostname}:{port}", variable=variable, file=file, line=line)
            hostname, port = store
        return original(hostname, port, rank, world_size, *args, **kwargs)

    patches = Patches(among="torch")
    patches.replace(original, led)
    patches.apply()
