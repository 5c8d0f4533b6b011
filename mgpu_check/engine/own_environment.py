"""Environment variables that a world's processes have from their start, whether or not the pytest process has them."""

from __future__ import annotations

from collections.abc import Mapping

OwnEnvironment = tuple[tuple[str, str], ...]

_OF_THE_ENGINE = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "NCCL_HOSTID",
    ]
)
"""The engine sets these for each rank: they define its place in the world and the devices that it sees."""


def own_environment(environment: Mapping[str, str] | None) -> OwnEnvironment:
    """Return environment variables, sorted by name, as part of the key of a world."""
    if environment is None:
        return ()
    if not isinstance(environment, Mapping):
        raise ValueError(f"environment={environment!r} is not a mapping; choose one from names to values, both str")
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"environment: {name!r} is not a valid variable name; choose a non-empty str without '='")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"environment: {name}={value!r} is not a valid value; choose a str, such as '1'")
        if name in _OF_THE_ENGINE:
            raise ValueError(
                f"environment: {name} is set for each rank; choose other variables than "
                f"{', '.join(sorted(_OF_THE_ENGINE))}"
            )
    return tuple(sorted(environment.items()))
