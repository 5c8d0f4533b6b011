"""Let ranks meet at the store of this comparison, whatever address the script has for them.

Each rank is launched as by torchrun, whose agent holds the store: no rank makes one of its own. A rank that looks for the
store at another address would find none, and wait for it until it times out.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mgpu_check.compare.watched import Note, rank_and_world
from mgpu_check.processes.frames import calling_line
from mgpu_check.torch_hooks.patches import Patches

__all__ = ["install"]

_LOCAL = ("localhost", "127.0.0.1", "::1")

Places = Mapping[str, tuple[str, int]]
"""Variable of the environment -> file and line that have set it."""


def install(note: Note, store: tuple[str, int], places: Places) -> None:
    """Lead the ranks of a group that has the size of the run to `store`, and note "led" where the script has another
    address.

    Args:
        places: where the script has set variables, to be read when it makes the group.
    """
    if not torch.distributed.is_available():
        return
    # By its name, because the package has a function of the same name.
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
