"""The rank that this process is, and functions that get it as their argument ``rank``."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_check.processes.channel import Placeholder

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Rank:
    """This process's place in the world.

    Attributes:
        index: rank in the default process group, 0 to size - 1.
        size: world size.
        local_index: index of the rank on this machine.
        node_index: index of this machine.
        device: the device that this rank owns: ``cuda:<local_index>``, unless the caller chose other devices.
        mesh: the mesh of a gate with `meshes`, else None; ``rank.mesh["tp"]`` is one of its axes.
    """

    index: int
    size: int
    local_index: int
    node_index: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def group(self) -> ProcessGroup:
        import torch.distributed as dist

        group = dist.group.WORLD
        assert group is not None, "the default process group of this rank was destroyed"
        return group


_current: Rank | None = None


def become(rank: Rank) -> None:
    global _current
    _current = rank


def current_rank() -> Rank | None:
    """Return the rank of this process; None in the node process and outside the engine."""
    return _current


def with_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rank: object = Placeholder("rank")
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with `rank` added if `fn` has a parameter ``rank`` that `kwargs` do not give."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return args, kwargs
    if "rank" not in parameters or "rank" in kwargs:
        return args, kwargs
    position = list(parameters).index("rank")
    if parameters["rank"].kind is inspect.Parameter.KEYWORD_ONLY or position > len(args):
        return args, {**kwargs, "rank": rank}
    return (*args[:position], rank, *args[position:]), kwargs


_FORM = re.compile(r"[\w.]+:\w+")


class NamedFunction:
    """Stands for the function ``module:name``, which each rank imports when it is called.
    If it has a parameter ``rank``, it receives the `Rank`."""

    def __init__(self, text: str) -> None:
        if not _FORM.fullmatch(text):
            raise ValueError(
                f"fn={text!r} is no function; give a function, or its name such as 'package.module:function'"
            )
        self.__qualname__ = text
        self.__name__ = text.rpartition(":")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = pkgutil.resolve_name(self.__qualname__)
        args, kwargs = with_rank(function, args, kwargs, current_rank())
        return function(*args, **kwargs)
