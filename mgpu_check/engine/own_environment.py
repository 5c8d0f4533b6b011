"""Variables that a world has from its start, whatever those of the pytest process are."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OwnEnvironment", "own_environment"]

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
"""They say where a rank is, and which devices it sees."""


def own_environment(environment: Mapping[str, str] | None) -> OwnEnvironment:
    """Return variables as part of the key of a world, in one order.

    Raises:
        ValueError: a name or a value that no variable has, or one that the engine sets itself.
    """
    if environment is None:
        return ()
    if not isinstance(environment, Mapping):
        raise ValueError(f"environment={environment!r} is no mapping; choose one of names to values, both str")
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(
                f"environment: {name!r} is no name of a variable; choose a str without '=' that is not empty"
            )
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"environment: {name}={value!r} is no value of a variable; choose a str, such as '1'")
        if name in _OF_THE_ENGINE:
            raise ValueError(
                f"environment: {name} is set for each rank; choose other variables than {', '.join(sorted(_OF_THE_ENGINE))}"
            )
    return tuple(sorted(environment.items()))
