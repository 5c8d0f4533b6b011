"""The table of collectives, with one row for each, and how to read the arguments of a call by it: of a function of
``torch.distributed`` or of a method of a process group. Imports no torch.

The recorder, the readers of arguments, the rules for mistakes, the simulated node, the suite and the acceptance
all use this table.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Members = Literal["all", "root"]
Sizes = Literal["equal", "paired", ""]

OPERATIONS = ("op", "reduceOp")  # parameters for the operation of a reduction
ROOTS = ("src", "dst", "group_src", "group_dst")
"""Parameters for one rank: its rank in the default group, or its index in the group."""


@dataclass(frozen=True)
class Transfer:
    """How tensors pass between the members of a group, in all forms of a collective."""

    # givers, takers: the members that give tensors, and the members that get a result
    givers: Members = "all"
    takers: Members = "all"
    divides: bool = False  # whether a giver has one part for each taker, and not the same tensor for all
    joins: bool = False  # whether a result has a part from each giver, in their order
    reduces: bool = False  # whether a result combines the tensors of all givers
    direct: bool = False  # whether NCCL sends from giver to taker, and not along a ring of all members

    @property
    def root(self) -> str:
        """The parameter for the root, "src" or "dst"; empty without a root."""
        return "src" if self.givers == "root" else "dst" if self.takers == "root" else ""

    def gives(self, member: int, root: int) -> bool:
        return self.givers == "all" or member == root

    def takes(self, member: int, root: int) -> bool:
        return self.takers == "all" or member == root

    def sources(self, member: int, count: int, root: int) -> Sequence[int]:
        """Return the givers of the result of a member, in their order; none if it gets no result.

        If the transfer divides, the part of each giver is the one numbered `member`.
        """
        if not self.takes(member, root):
            return ()
        return range(count) if self.givers == "all" else (root,)

    def share_of_link(self, count: int) -> float:
        """Return the bytes that cross the busiest link, divided by the bytes of a member's largest tensor or list.

        This is also the factor from the algorithm bandwidth to the bus bandwidth of nccl-tests.
        """
        if self.root and not self.divides and not self.joins:
            return 1.0
        return (2 if self.reduces and not self.divides else 1) * (count - 1) / count


TRANSFERS: Mapping[str, Transfer] = MappingProxyType({
    "all_reduce": Transfer(reduces=True),
    "reduce": Transfer(takers="root", reduces=True),
    "reduce_scatter": Transfer(divides=True, reduces=True),
    "broadcast": Transfer(givers="root"),
    "all_gather": Transfer(joins=True),
    "all_to_all": Transfer(divides=True, joins=True, direct=True),
    "gather": Transfer(takers="root", joins=True, direct=True),
    "scatter": Transfer(givers="root", divides=True, direct=True),
})  # fmt: skip
"""Name of a transfer -> its row. Each collective of tensors has one of these."""


@dataclass(frozen=True)
class Method:
    """A method of `torch.distributed.ProcessGroup`."""

    function: str  # the equivalent function, whose name reports use
    # the function's names for the parameters, in the order of the method. Methods take ranks as indices in the group.
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A function of ``torch.distributed``."""

    # a name in `TRANSFERS`; or passes Python "objects"; nothing for a "barrier"; a "message" from one other rank; or a
    # "model", which the constructor of DistributedDataParallel checks or copies
    does: str
    # the parameter whose value is compared between ranks: their contribution or result; "" for no comparison
    operand: str = ""
    # "equal" if all ranks must have tensors with the same dtype and number of elements; "paired" if the tensors of a
    # rank must match those of its peer (see `collectives`); "" if sizes are not compared
    sizes: Sizes = ""
    # the modules of ``torch.distributed`` that define it. The operand of a functional collective is `self`.
    homes: tuple[str, ...] = ("distributed_c10d",)
    # the equivalent methods of process groups, with their parameters; see `Method`
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # the parameters for the tensors that a rank gives, and for its result. They are equal if the result replaces the
    # input, and empty for several tensors in one call and for functional collectives.
    tensors: tuple[str, str] = ("", "")
    newer: str = ""  # a newer name of the same function, in versions of torch that deprecate this one

    @property
    def transfer(self) -> Transfer | None:
        """How its tensors pass between ranks; None if it passes none, or to one rank only."""
        return TRANSFERS.get(self.does)

    @property
    def kind(self) -> str:
        """The result on the ranks: a "reduction" of all tensors; "parts", one from or for each rank; a "copy" of one
        rank's tensor; for others as in `does`."""
        if (transfer := self.transfer) is None:
            return self.does
        if transfer.divides or transfer.joins:
            return "parts"
        return "reduction" if transfer.reduces else "copy"

    @property
    def given(self) -> str:
        """The parameter for the tensors that a rank gives."""
        return self.tensors[0]

    @property
    def taken(self) -> str:
        """The parameter for the result of a rank."""
        return self.tensors[1]

    @property
    def reduces(self) -> bool:
        """True if the result combines the tensors of several ranks."""
        return self.transfer is not None and self.transfer.reduces

    @property
    def in_place(self) -> bool:
        """True if the result replaces the input."""
        return bool(self.given) and self.given == self.taken

    @property
    def lists(self) -> bool:
        """True if an operand is a list with a tensor for each rank."""
        return is_list(self.given) or is_list(self.taken)


def is_list(parameter: str) -> bool:
    """Return whether the parameter of a collective takes a list with a tensor for each rank."""
    return parameter.endswith("_list")


_BOTH = ("distributed_c10d", "_functional_collectives")
_FUNCTIONAL = ("_functional_collectives",)
_MODEL = ("utils",)
_SPLITS = ("output", "input", "output_split_sizes", "input_split_sizes")
_TENSOR = "tensor", "tensor"
_GATHERED = "input_tensor", "output_tensor"
_SCATTERED = "input", "output"

COLLECTIVES: Mapping[str, Collective] = MappingProxyType({
    "all_reduce": Collective("all_reduce", "tensor", "equal", _BOTH, {"allreduce": ("tensor", "op")}, tensors=_TENSOR),
    "all_reduce_coalesced": Collective(
        "all_reduce", "tensors", "equal", _BOTH, {"allreduce_coalesced": ("tensors", "op")}
    ),
    "reduce": Collective(
        "reduce", "tensor", "equal", methods={"reduce": ("tensor", "group_dst", "op")}, tensors=_TENSOR
    ),
    "broadcast": Collective(
        "broadcast", "tensor", "equal", _BOTH, {"broadcast": ("tensor", "group_src")}, tensors=_TENSOR
    ),
    "all_gather": Collective(
        "all_gather", "tensor", "paired", methods={"allgather": ("tensor_list", "tensor")},
        tensors=("tensor", "tensor_list"),
    ),
    "all_gather_coalesced": Collective(
        "all_gather", "input_tensor_list", "equal",
        methods={"allgather_coalesced": ("output_tensor_lists", "tensors")},
    ),
    "all_gather_into_tensor": Collective(
        "all_gather", "input_tensor", "equal",
        methods={"_allgather_base": ("output", "tensor"), "all_gather_single": ("output", "tensor")},
        newer="all_gather_single", tensors=_GATHERED,
    ),
    "all_gather_single": Collective("all_gather", "input_tensor", "equal", _BOTH, tensors=_GATHERED),
    "all_gather_tensor": Collective("all_gather", "self", "equal", _FUNCTIONAL),
    "all_gather_into_tensor_coalesced": Collective(
        "all_gather", "self", "equal", _FUNCTIONAL,
        {
            "allgather_into_tensor_coalesced": ("outputs", "tensors"),
            "all_gather_single_coalesced": ("outputs", "tensors"),
        },
    ),
    "all_gather_single_coalesced": Collective("all_gather", "self", "equal", _FUNCTIONAL),
    "gather": Collective(
        "gather", "tensor", "paired", methods={"gather": ("gather_list", "tensor", "group_dst")},
        tensors=("tensor", "gather_list"),
    ),
    "gather_single": Collective(
        "gather", "tensor", "equal",
        methods={
            "gather_single": ("output", "tensor", "group_dst"),
            "gather_into_tensor": ("output", "tensor", "group_dst"),
        },
    ),
    "gather_into_tensor": Collective("gather", "tensor", "equal"),
    "scatter": Collective(
        "scatter", "tensor", "paired", methods={"scatter": ("tensor", "scatter_list", "group_src")},
        tensors=("scatter_list", "tensor"),
    ),
    "reduce_scatter": Collective(
        "reduce_scatter", "output", "paired", methods={"reduce_scatter": ("output", "input_list", "op")},
        tensors=("input_list", "output"),
    ),
    "reduce_scatter_tensor": Collective(
        "reduce_scatter", "output", "equal", _BOTH,
        {"_reduce_scatter_base": ("tensor", "input", "op"), "reduce_scatter_single": ("tensor", "input", "op")},
        newer="reduce_scatter_single", tensors=_SCATTERED,
    ),
    "reduce_scatter_single": Collective("reduce_scatter", "output", "equal", _BOTH, tensors=_SCATTERED),
    "reduce_scatter_tensor_coalesced": Collective(
        "reduce_scatter", "self", "equal", _FUNCTIONAL,
        {
            "reduce_scatter_tensor_coalesced": ("tensors", "inputs", "op"),
            "reduce_scatter_single_coalesced": ("tensors", "inputs", "op"),
        },
    ),
    "reduce_scatter_single_coalesced": Collective("reduce_scatter", "self", "equal", _FUNCTIONAL),
    "all_to_all": Collective(
        "all_to_all", "", "paired", methods={"alltoall": ("output_tensor_list", "input_tensor_list")},
        tensors=("input_tensor_list", "output_tensor_list"),
    ),
    "all_to_all_single": Collective(
        "all_to_all", "", "paired", _BOTH, {"alltoall_base": _SPLITS, "all_to_all_single": _SPLITS}, tensors=_SCATTERED
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


_SINGLE = ("tensor", "output", "input")
# Names of the options as arguments of methods, and as attributes of the options objects that some methods take.
_KEYWORDS = {
    "op": ("op", "reduceOp"),
    "group_src": ("root", "srcRank", "rootRank"),
    "group_dst": ("root", "dstRank", "rootRank"),
    "tag": ("tag",),
}
_OTHER_KEYWORDS = frozenset({"opts", "timeout", "op", "root", "tag", "srcRank", "dstRank"})


class Form(abc.ABC):
    """How to read the arguments of one function or method."""

    parameters: tuple[str, ...]  # the names that `argument` accepts
    group: str  # name of the parameter for the process group
    operand: str  # name of the parameter for the operand; empty without an operand
    options: tuple[str, ...]  # names of the parameters that must be equal on all ranks
    root: str  # name of the parameter for the root or peer, "src" or "dst"

    def __init__(self, function: str) -> None:
        row = COLLECTIVES[function]
        self.name = function.lstrip("_")  # of the function of `torch.distributed` in reports
        self.peer = row.kind == "message"  # whether it is a send or a receive
        self.symmetric = row.sizes == "equal"  # whether all ranks must have operands of the same dtypes and sizes
        # Whether the tensors of a rank must match those of its peers; see `collectives`.
        self.paired = row.sizes == "paired"

    @abc.abstractmethod
    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument called `name`, or None."""


class FunctionForm(Form):
    """Reads the arguments of one function by its signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function.__name__)
        parameters = inspect.signature(function).parameters
        self.parameters = tuple(parameters)
        self._positions = {name: index for index, name in enumerate(parameters)}
        self.operand = COLLECTIVES[function.__name__].operand
        self.group = "group" if "group" in parameters else "process_group"
        self.options = tuple(name for name in (*OPERATIONS, *ROOTS) if name in parameters)
        self.root = "src" if "src" in parameters else "dst"
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
        if "self" in parameters:  # a functional collective: `self` is its input
            self.operand = "self"
            self._positions["input"] = self._positions["self"]

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else self._defaults.get(name)


class MethodForm(Form):
    """Reads the arguments of one method by the table. Its first argument is the group."""

    def __init__(self, method: str) -> None:
        super().__init__(METHODS[method].function)
        self._given = METHODS[method].parameters
        self.parameters = ("group", *self._given)
        self.operand = next((name for name in ("tensor", "tensors", "output") if name in self._given), "")
        self.group = "group"
        self.options = tuple(name for name in (*OPERATIONS, *ROOTS) if name in self._given)
        self.root = "src" if "group_src" in self._given or self.name == "recv" else "dst"

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "group":
            return args[0]
        if name not in self._given:
            return None
        position = 1 + self._given.index(name)
        if name in _KEYWORDS:
            return _option(name, args[position : position + 1], [*args[1:], kwargs.get("opts")], kwargs)
        positional = [*args[1:], *(value for key, value in kwargs.items() if key not in _OTHER_KEYWORDS)]
        value = positional[position - 1] if position <= len(positional) else None
        if name in _SINGLE or (is_list(name) and _nested(value)):
            return value[0] if isinstance(value, (list, tuple)) and value else value
        return value


def _nested(value: Any) -> bool:
    """Return whether a value is a list of lists of tensors, with one list for the single device of this process."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (list, tuple))


def _option(name: str, at: Sequence[Any], objects: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for key in _KEYWORDS[name]:
        if key in kwargs:
            return kwargs[key]
        for value in objects:
            if type(value).__name__.endswith("Options") and hasattr(value, key):
                return getattr(value, key)
    return next((value for value in at if not type(value).__name__.endswith("Options")), None)
