"""The table of collectives: all that is known of each, in one row. Plain data; imports no torch.

Who records collectives, reads their arguments, looks for mistakes in them or simulates them reads it here.
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
"""Parameters that say how tensors are reduced."""
ROOTS = ("src", "dst", "group_src", "group_dst")
"""Parameters that name one rank, in the default group or by its index in the group."""


@dataclass(frozen=True)
class Method:
    """A method of `torch.distributed.ProcessGroup`.

    Attributes:
        function: the function that does the same; both have one name in reports.
        parameters: those of that function, in the order of the method's. A method names ranks by their index in the group.
    """

    function: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A function of ``torch.distributed``.

    Attributes:
        kind: what ranks have after it: a "reduction" of all tensors; "parts", one by each rank or for each rank; a "copy"
            of one rank's tensor; Python "objects"; nothing, of a "barrier"; a "message" of one other rank; or a "model",
            checked or copied as DistributedDataParallel is made.
        operand: the parameter that says what a rank contributes, or receives, by which ranks can be compared; "" where there
            is none.
        sizes: "equal" where every rank has tensors of as many elements, and of the same dtype; "paired" where what a rank
            has must be what its peer has for it (see `flows`); "" where they are not compared.
        homes: the modules of ``torch.distributed`` that have it. Of functional collectives the operand is `self`.
        methods: the methods of process groups that do the same, with their parameters; see `Method`.
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
"""By name of the function. In reports a name has no underscore at its beginning."""

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method: Method(name, parameters)
        for name, collective in COLLECTIVES.items()
        for method, parameters in collective.methods.items()
    }
)
"""By name of the method."""
