"""The table of collectives, with one row for each. Plain data; imports no torch.

The recorder, the readers of arguments, the rules for mistakes, and the simulated node all use this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

__all__ = ["COLLECTIVES", "METHODS", "OPERATIONS", "ROOTS", "Collective", "Method"]

Kind = Literal["reduction", "parts", "copy", "objects", "barrier", "message", "model"]
Sizes = Literal["equal", "paired", ""]

OPERATIONS = ("op", "reduceOp")
"""Parameters for the operation of a reduction."""
ROOTS = ("src", "dst", "group_src", "group_dst")
"""Parameters for one rank: its rank in the default group, or its index in the group."""


@dataclass(frozen=True)
class Method:
    """A method of `torch.distributed.ProcessGroup`.

    Attributes:
        function: the equivalent function, whose name reports use.
        parameters: the function's names for the parameters, in the order of the method. Methods take ranks as indices
            in the group.
    """

    function: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A function of ``torch.distributed``.

    Attributes:
        kind: the result on the ranks: a "reduction" of all tensors; "parts", one from or for each rank; a "copy" of one
            rank's tensor; Python "objects"; nothing for a "barrier"; a "message" from one other rank; or a "model",
            which the constructor of DistributedDataParallel checks or copies.
        operand: the parameter whose value is compared between ranks: their contribution or result; "" for no
            comparison.
        sizes: "equal" if all ranks must have tensors with the same dtype and number of elements; "paired" if the
            tensors of a rank must match those of its peer (see `flows`); "" if sizes are not compared.
        homes: the modules of ``torch.distributed`` that define it. The operand of a functional collective is `self`.
        methods: the equivalent methods of process groups, with their parameters; see `Method`.
    """

    kind: Kind
    operand: str = ""
    sizes: Sizes = ""
    homes: tuple[str, ...] = ("distributed_c10d",)
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_BOTH = ("distributed_c10d", "_functional_collectives")
_FUNCTIONAL = ("_functional_collectives",)
_MODEL = ("utils",)
_SPLITS = ("output", "input", "output_split_sizes", "input_split_sizes")

COLLECTIVES: Mapping[str, Collective] = MappingProxyType({
    "all_reduce": Collective("reduction", "tensor", "equal", _BOTH, {"allreduce": ("tensor", "op")}),
    "all_reduce_coalesced": Collective(
        "reduction", "tensors", "equal", _BOTH, {"allreduce_coalesced": ("tensors", "op")}
    ),
    "reduce": Collective("reduction", "tensor", "equal", methods={"reduce": ("tensor", "group_dst", "op")}),
    "broadcast": Collective("copy", "tensor", "equal", _BOTH, {"broadcast": ("tensor", "group_src")}),
    "all_gather": Collective("parts", "tensor", "paired", methods={"allgather": ("tensor_list", "tensor")}),
    "all_gather_coalesced": Collective(
        "parts", "input_tensor_list", "equal", methods={"allgather_coalesced": ("output_tensor_lists", "tensors")}
    ),
    "all_gather_into_tensor": Collective(
        "parts", "input_tensor", "equal",
        methods={"_allgather_base": ("output", "tensor"), "all_gather_single": ("output", "tensor")},
    ),
    "all_gather_single": Collective("parts", "input_tensor", "equal", _BOTH),
    "all_gather_tensor": Collective("parts", "self", "equal", _FUNCTIONAL),
    "all_gather_into_tensor_coalesced": Collective(
        "parts", "self", "equal", _FUNCTIONAL,
        {
            "allgather_into_tensor_coalesced": ("outputs", "tensors"),
            "all_gather_single_coalesced": ("outputs", "tensors"),
        },
    ),
    "all_gather_single_coalesced": Collective("parts", "self", "equal", _FUNCTIONAL),
    "gather": Collective("parts", "tensor", "paired", methods={"gather": ("gather_list", "tensor", "group_dst")}),
    "gather_single": Collective(
        "parts", "tensor", "equal",
        methods={
            "gather_single": ("output", "tensor", "group_dst"),
            "gather_into_tensor": ("output", "tensor", "group_dst"),
        },
    ),
    "gather_into_tensor": Collective("parts", "tensor", "equal"),
    "scatter": Collective("parts", "tensor", "paired", methods={"scatter": ("tensor", "scatter_list", "group_src")}),
    "reduce_scatter": Collective(
        "parts", "output", "paired", methods={"reduce_scatter": ("output", "input_list", "op")}
    ),
    "reduce_scatter_tensor": Collective(
        "parts", "output", "equal", _BOTH,
        {"_reduce_scatter_base": ("tensor", "input", "op"), "reduce_scatter_single": ("tensor", "input", "op")},
    ),
    "reduce_scatter_single": Collective("parts", "output", "equal", _BOTH),
    "reduce_scatter_tensor_coalesced": Collective(
        "parts", "self", "equal", _FUNCTIONAL,
        {
            "reduce_scatter_tensor_coalesced": ("tensors", "inputs", "op"),
            "reduce_scatter_single_coalesced": ("tensors", "inputs", "op"),
        },
    ),
    "reduce_scatter_single_coalesced": Collective("parts", "self", "equal", _FUNCTIONAL),
    "all_to_all": Collective(
        "parts", "", "paired", methods={"alltoall": ("output_tensor_list", "input_tensor_list")}
    ),
    "all_to_all_single": Collective(
        "parts", "", "paired", _BOTH, {"alltoall_base": _SPLITS, "all_to_all_single": _SPLITS}
    ),
    "all_gather_object": Collective("objects"),
    "gather_object": Collective("objects"),
    "scatter_object_list": Collective("objects"),
    "broadcast_object_list": Collective("objects"),
    "barrier": Collective("barrier", methods={"barrier": ()}),
    "monitored_barrier": Collective("barrier", methods={"monitored_barrier": ()}),
    "send": Collective("message", "tensor", "paired", methods={"send": ("tensor", "group_dst", "tag")}),
    "isend": Collective("message", "tensor", "paired"),
    "recv": Collective(
        "message", "tensor", "paired",
        methods={"recv": ("tensor", "group_src", "tag"), "recv_anysource": ("tensor", "tag")},
    ),
    "irecv": Collective("message", "tensor", "paired"),
    "send_object_list": Collective("message", "", "paired"),
    "recv_object_list": Collective("message", "", "paired"),
    "_verify_param_shape_across_processes": Collective("model", "tensors", homes=_MODEL),
    "_sync_params_and_buffers": Collective("model", "module_states", homes=_MODEL),
})  # fmt: skip
"""Name of the function -> its row. Reports omit a leading underscore."""

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method: Method(name, parameters)
        for name, collective in COLLECTIVES.items()
        for method, parameters in collective.methods.items()
    }
)
"""Name of the method -> its function and parameters."""
