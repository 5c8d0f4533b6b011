"""Build the environment of a Python that runs a user's script: without a launcher's variables, on simulated GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mgpu_check.processes.python_path import with_startup

OF_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(RANK|NAME|WORLD_SIZE)"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|NODEID)"
)
"""Variables that describe one launched process, and would be wrong in its children."""


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a launcher."""
    return {name: value for name, value in environment.items() if not OF_LAUNCHERS.fullmatch(name)}


def simulating(environment: Mapping[str, str], gpus: int | None, backing: str = "cpu") -> dict[str, str]:
    """Return an environment whose Pythons simulate `gpus` GPUs on `backing`; an unchanged copy if `gpus` is None."""
    made = dict(environment)
    if gpus is None:
        return made
    if backing == "cpu":
        # It restricts real devices, often to none. If the program sets it for its children, it takes effect there.
        made.pop("CUDA_VISIBLE_DEVICES", None)
    made["PYTHONPATH"] = with_startup(made)
    made["_MGPU_CHECK_SIMULATE"] = f"{gpus},{backing}"
    return made
