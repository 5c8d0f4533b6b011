"""The methods of `torch.distributed.ProcessGroup`, as the functions of ``torch.distributed`` that do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_check.torch_hooks.flows import FLOWS

__all__ = ["METHODS", "MethodForm"]

# The function, and its parameters in the order of the method's. A method names ranks by their index in the group.
METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "allreduce": ("all_reduce", ("tensor", "op")),
    "allreduce_coalesced": ("all_reduce_coalesced", ("tensors", "op")),
    "broadcast": ("broadcast", ("tensor", "group_src")),
    "reduce": ("reduce", ("tensor", "group_dst", "op")),
    "allgather": ("all_gather", ("tensor_list", "tensor")),
    "allgather_coalesced": ("all_gather_coalesced", ("output_tensor_lists", "tensors")),
    "_allgather_base": ("all_gather_into_tensor", ("output", "tensor")),
    "all_gather_single": ("all_gather_into_tensor", ("output", "tensor")),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", ("outputs", "tensors")),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", ("outputs", "tensors")),
    "reduce_scatter": ("reduce_scatter", ("output", "input_list", "op")),
    "_reduce_scatter_base": ("reduce_scatter_tensor", ("tensor", "input", "op")),
    "reduce_scatter_single": ("reduce_scatter_tensor", ("tensor", "input", "op")),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", ("tensors", "inputs", "op")),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", ("tensors", "inputs", "op")),
    "gather": ("gather", ("gather_list", "tensor", "group_dst")),
    "gather_single": ("gather_single", ("output", "tensor", "group_dst")),
    "gather_into_tensor": ("gather_single", ("output", "tensor", "group_dst")),
    "scatter": ("scatter", ("tensor", "scatter_list", "group_src")),
    "alltoall": ("all_to_all", ("output_tensor_list", "input_tensor_list")),
    "alltoall_base": ("all_to_all_single", ("output", "input", "output_split_sizes", "input_split_sizes")),
    "all_to_all_single": ("all_to_all_single", ("output", "input", "output_split_sizes", "input_split_sizes")),
    "send": ("send", ("tensor", "group_dst", "tag")),
    "recv": ("recv", ("tensor", "group_src", "tag")),
    "recv_anysource": ("recv", ("tensor", "tag")),
    "barrier": ("barrier", ()),
    "monitored_barrier": ("monitored_barrier", ()),
}

_SINGLE = ("tensor", "output", "input")
_LISTS = ("tensor_list", "gather_list", "scatter_list", "input_list")
# How they are called as arguments of the methods, and in the objects with options that some of those take.
_KEYWORDS = {
    "op": ("op", "reduceOp"),
    "group_src": ("root", "srcRank", "rootRank"),
    "group_dst": ("root", "dstRank", "rootRank"),
    "tag": ("tag",),
}
_OTHER_KEYWORDS = frozenset({"opts", "timeout", "op", "root", "tag", "srcRank", "dstRank"})


class MethodForm:
    """How to read the arguments of one method; as `collectives.Form`."""

    def __init__(self, method: str, symmetric: bool) -> None:
        self.name, self.parameters = METHODS[method]
        self.symmetric = symmetric
        self.operand = next((name for name in ("tensor", "tensors", "output") if name in self.parameters), "")
        self.peer = self.name in ("send", "recv")
        self.flows = self.name if self.name in FLOWS else None
        self.group = "group"
        self.options: tuple[str, ...] = tuple(
            name for name in ("op", "group_src", "group_dst") if name in self.parameters
        )
        self.root = "src" if "group_src" in self.parameters or self.name == "recv" else "dst"

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "group":
            return args[0]
        if name not in self.parameters:
            return None
        position = 1 + self.parameters.index(name)
        if name in _KEYWORDS:
            return _option(name, args[position : position + 1], [*args[1:], kwargs.get("opts")], kwargs)
        given = [*args[1:], *(value for key, value in kwargs.items() if key not in _OTHER_KEYWORDS)]
        value = given[position - 1] if position <= len(given) else None
        if name in _SINGLE or (name in _LISTS and _nested(value)):
            return value[0] if isinstance(value, (list, tuple)) and value else value
        return value


def _nested(value: Any) -> bool:
    """Return whether it is a list of lists of tensors: of one for each device of this process, of which there is one."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (list, tuple))


def _option(name: str, at: Sequence[Any], objects: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for key in _KEYWORDS[name]:
        if key in kwargs:
            return kwargs[key]
        for value in objects:
            if type(value).__name__.endswith("Options") and hasattr(value, key):
                return getattr(value, key)
    return next((value for value in at if not type(value).__name__.endswith("Options")), None)
