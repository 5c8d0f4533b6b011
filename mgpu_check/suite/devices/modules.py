"""Check that modules and packed sequences move between devices, and which results share memory with their source."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import rnn

from mgpu_check.suite.common.agreement import WrongCase, difference, named_wrong
from mgpu_check.suite.common.values import anything, significands

_HOST = torch.device("cpu")


class _Holding(nn.Module):
    """A module with each kind of state: parameters, a frozen and a tied one, buffers, a gradient, modes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(significands((3, 4), torch.float32, seed).clone())
        self.frozen = nn.Parameter(significands((5,), torch.bfloat16, seed).clone(), requires_grad=False)
        self.inner = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(significands((3, 2), torch.float32, seed + 1))
        self.tied = self.inner.weight
        self.register_buffer("saved", anything(7, torch.int64, seed).clone())
        self.register_buffer("unsaved", anything(9, torch.float32, seed).clone(), persistent=False)
        self.register_buffer("missing", None)
        self.trained.grad = significands((3, 4), torch.float32, seed + 2).clone()
        self.inner.eval()


_MOVES: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "Module.to": lambda module, device: module.to(device),
    "Module.cuda or cpu": lambda module, device: module.cuda(device) if device.type == "cuda" else module.cpu(),
    "Module.to, non_blocking": lambda module, device: _waited(module.to(device, non_blocking=True)),
    "Module.to, by name": lambda module, device: module.to(str(device)),
}

_TWINS: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "Module.to of a deepcopy": lambda module, device: copy.deepcopy(module).to(device),
    "deepcopy after Module.to": lambda module, device: copy.deepcopy(module.to(device)),
}
"""Moves of a deep copy, which loses gradients: `copy.deepcopy` does not copy those of parameters."""


def _waited(module: nn.Module) -> nn.Module:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return module


def assert_modules_move(devices: Sequence[torch.device], seed: int = 0) -> int:
    """Assert that a module keeps all its tensors and modes when it moves between devices and the host.

    Parameters, frozen parameters, gradients and buffers must arrive bit for bit, including buffers that are not in the
    state dict. Tied parameters must stay tied. Sequences that are packed on the host must unpack elsewhere in order.

    Returns:
        the number of moves.
    """
    wrong: list[WrongCase] = []
    ways = [*zip([_HOST, *devices], [*devices, _HOST], strict=True), *zip(devices[1:], devices, strict=False)]
    for source, target in ways:
        for name, move in (_MOVES | _TWINS).items():
            module, expected = _Holding(seed).to(source), _Holding(seed)
            if name in _TWINS:
                expected.zero_grad()
            if what := _lost(move(module, target), expected, target):
                named = target if target.type == "cuda" else source
                wrong.append(WrongCase(named, f"{name} from {source} to {target}", what))
        if what := _disordered(source, target, seed):
            named = target if target.type == "cuda" else source
            wrong.append(WrongCase(named, f"PackedSequence.to from {source} to {target}", what))
    moves = len(ways) * (len(_MOVES | _TWINS) + 1)
    if wrong:
        raise named_wrong(wrong, devices, moves, "the source")
    return moves


def _disordered(source: torch.device, target: torch.device, seed: int) -> str:
    """Describe how sequences of unequal lengths differ that were packed on the host and moved; "" if they do not."""
    lengths = torch.tensor([2, 4, 3])  # the permutation that sorts them is not its own inverse
    steps = significands((3, 4, 2), torch.float32, seed)
    packed = rnn.pack_padded_sequence(steps, lengths, True, enforce_sorted=False)
    # Any: the annotation of `PackedSequence.to` takes no device.
    moved: Any = packed
    moved = moved.to(source).to(target)
    if moved.data.device != target:
        return f"it is on {moved.data.device}"
    got, right = (rnn.pad_packed_sequence(one, batch_first=True)[0] for one in (moved, packed))
    return difference(got, right, "bits")


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad


def _lost(module: nn.Module, expected: nn.Module, device: torch.device) -> str:
    got, right = dict(_held(module)), dict(_held(expected))
    if list(got) != list(right):
        return f"it holds {', '.join(got)}; expected {', '.join(right)}"
    for name, tensor in right.items():
        if got[name].device != device:
            return f"{name} is on {got[name].device}"
        if got[name].requires_grad != tensor.requires_grad:
            return f"requires_grad of {name} is {got[name].requires_grad}"
        if what := difference(got[name].detach(), tensor.detach(), "bits"):
            return f"{name}: {what}"
    if module.tied is not module.get_submodule("inner").weight:
        return "a parameter with two names has become two"
    if module.state_dict().keys() != expected.state_dict().keys():
        return f"its state dict has {', '.join(module.state_dict())}; expected {', '.join(expected.state_dict())}"
    if [part.training for part in module.modules()] != [part.training for part in expected.modules()]:
        return "the training modes of its parts have changed"
    return ""


Taken = dict[str, Callable[[torch.Tensor], torch.Tensor]]

_COPIES: Taken = {
    "to(its device, copy=True)": lambda x: x.to(x.device, copy=True),
    "to(its dtype, copy=True)": lambda x: x.to(x.dtype, copy=True),
    "to(itself, copy=True)": lambda x: x.to(x, copy=True),
    "clone": lambda x: x.clone(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "asarray(copy=True)": lambda x: torch.asarray(x, copy=True),
    "contiguous, of transposed": lambda x: x.t().contiguous(),
    "reshape, of transposed": lambda x: x.t().reshape(-1),
    "flatten, of transposed": lambda x: x.t().flatten(),
    "cat of one": lambda x: torch.cat([x]),
    "stack of one": lambda x: torch.stack([x]),
    "repeat once": lambda x: x.repeat(1, 1),
    "indexed by a list": lambda x: x[[0, 1, 2]],
    "index_select": lambda x: x.index_select(0, torch.arange(3, device=x.device)),
    "adding nothing": lambda x: x + 0,
    "gone and come back": lambda x: x.cpu().to(x.device),
}
"""Calls that return a tensor with its own memory."""

_VIEWS: Taken = {
    "to(its device)": lambda x: x.to(x.device),
    "to(str(its device))": lambda x: x.to(str(x.device)),
    "cuda(its device)": lambda x: x.cuda(x.device),
    "to(its dtype)": lambda x: x.to(x.dtype),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.t(),
    "a slice": lambda x: x[0:],
    "chunk": lambda x: x.chunk(2)[0],
    "expand": lambda x: x.expand(3, 4),
    "as_tensor": lambda x: torch.as_tensor(x, device=x.device),
    "asarray(copy=False)": lambda x: torch.asarray(x, copy=False),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[0])[0],
    "Parameter": lambda x: nn.Parameter(x, requires_grad=False),
}
"""Calls that return a tensor with the memory of their argument.

Source of both lists: the documentation of `torch.Tensor.to` and of tensor views.
"""


def assert_memory_owned(devices: Sequence[torch.device], seed: int = 0) -> int:
    """Assert that copies on a device have their own memory, and that views share the memory of their source.

    Returns:
        the number of results that were checked.
    """
    wrong: list[WrongCase] = []
    data = significands((3, 4), torch.float32, seed)
    for device in devices:
        for owned, calls in ((True, _COPIES), (False, _VIEWS)):
            for name, call in calls.items():
                source = data.to(device)
                made = call(source)
                source.zero_()
                changed = not bool(made.any())
                if changed == owned:
                    what = "it shares memory with its source" if owned else "it has memory of its own"
                    wrong.append(WrongCase(device, f"the result of {name}", what))
    if wrong:
        raise named_wrong(wrong, devices, len(_COPIES) + len(_VIEWS), "the documentation")
    return len(devices) * (len(_COPIES) + len(_VIEWS))
