"""Operands on different devices: what must raise does, saying which devices; what must work does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from mgpu_check.checks.bits import same_bits
from mgpu_check.checks.devices import indices_of
from mgpu_check.checks.operating.agreement import Kind, Wrong, difference, named_wrong
from mgpu_check.checks.operators import CALLS, Operands
from mgpu_check.errors import DeviceMismatch
from mgpu_check.specs.operators import OperatorCase

__all__ = [
    "assert_arrives",
    "assert_each_refused",
    "assert_each_works",
    "assert_refused",
    "assert_right_on_each",
    "assert_works",
    "devices_named",
    "raises_device_mismatch",
]

Device = torch.device | str

_NAMES = re.compile(r"(?<![\w.])(cpu|cuda:\d+)(?![\w:])")
# What torch says where it names devices otherwise. Convolution: kinds of tensors, without an index.
_TYPES = re.compile(
    r"Input type \(torch\.(cuda\.)?\w+Tensor\) and "
    r"(?:weight|bias) type \(torch\.(cuda\.)?\w+Tensor\) should be the same"
)
# cudnn's own check: the indices alone.
_INDICES = re.compile(r"to have the same device as tensor for .*; but device (\d+) does not equal (\d+)")
# Indexing: the indexed tensor alone.
_INDEXED = re.compile(r"indices should be either on cpu or on the same device as the indexed tensor \((cpu|cuda:\d+)\)")


def devices_named(message: str) -> set[str]:
    """Return the devices that an error message of torch names: "cpu", "cuda:1", or "cuda" where it gives no index.

    Understood are devices by name, the types of tensors in a convolution's message, and the bare indices in cudnn's.
    Of the message for a misplaced index, it is the indexed tensor's device only: its "cpu" is what would be allowed.
    """
    if indexed := _INDEXED.search(message):
        return {indexed[1]}
    if types := _TYPES.search(message):
        return {"cuda" if kind else "cpu" for kind in types.groups()}
    if indices := _INDICES.search(message):
        return {f"cuda:{index}" for index in indices.groups()}
    return set(_NAMES.findall(message))


@contextlib.contextmanager
def raises_device_mismatch(first: Device, second: Device) -> Iterator[None]:
    """Assert that the block raises torch's error for operands on two devices, and that it names both.

    ::

        with raises_device_mismatch("cuda:0", "cpu"):
            net(batch)

    Two of torch's wordings name devices in their own way, and are accepted for the devices that they can be about: a
    convolution gives the types of its tensors (``torch.cuda.FloatTensor`` and ``torch.FloatTensor``), and an index on
    the wrong device is reported with the device of the indexed tensor only.

    Args:
        first: one device; "cuda" stands for any GPU.
        second: the other device, in any order.

    Raises:
        DeviceMismatch: nothing was raised, or something else than a RuntimeError, or its message names not both.
        ValueError: the devices are the same.
    """
    __tracebackhide__ = True
    pair = (torch.device(first), torch.device(second))
    if pair[0] == pair[1]:
        raise ValueError(f"raises_device_mismatch: {first!r} and {second!r} are one device; give two different ones")
    with _refusal(pair, ("both", "types", "indexed")):
        yield


def assert_refused(case: OperatorCase) -> None:
    """Assert that the operator of `case` works on one device, and refuses the case's two devices, naming both.

    Raises:
        DeviceMismatch: naming operator and devices, and what happened instead.
    """
    __tracebackhide__ = True
    first, second = torch.device(case.first), torch.device(case.second)
    with _described(f"{case.operator} with all operands on {first}", first, first):
        _call(case, first, first)
    call = _prepared(case, first, second)
    with _refusal((first, second), ("both", case.rule.names), case.operator):
        call()


def assert_works(case: OperatorCase) -> None:
    """Assert that the operator of `case` works across its two devices: the CPU's result, bit for bit, where it belongs.

    Raises:
        DeviceMismatch: it raised, or its result is on another device or differs.
    """
    __tracebackhide__ = True
    first, second = torch.device(case.first), torch.device(case.second)
    expected = _call(case, torch.device("cpu"), torch.device("cpu"))
    what = f"{case.operator} of operands on {first} and {second}"
    with _described(what, first, second):
        got = _call(case, first, second)
    if case.rule.result is None:
        device = first if first.type == "cuda" else second
    else:
        device = (first, second)[case.rule.result]
    _require(what, got, expected, device)


def assert_each_refused(cases: Sequence[OperatorCase]) -> None:
    """Assert of each case what `assert_refused` does, and say of all that are not what they have in common.

    Raises:
        DeviceMismatch: naming the first, the operators, and the devices that all of them have.
    """
    __tracebackhide__ = True
    _each(cases, assert_refused)


def assert_each_works(cases: Sequence[OperatorCase]) -> None:
    """Assert of each case what `assert_works` does, and say of all that do not what they have in common.

    Raises:
        DeviceMismatch: as of `assert_each_refused`.
    """
    __tracebackhide__ = True
    _each(cases, assert_works)


def _each(cases: Sequence[OperatorCase], check: Callable[[OperatorCase], None]) -> None:
    __tracebackhide__ = True
    found: list[tuple[OperatorCase, DeviceMismatch]] = []
    for case in cases:
        try:
            check(case)
        except DeviceMismatch as error:
            found.append((case, error))
    if not found:
        return
    first = found[0][1]
    text = str(first)
    if len(cases) > 1:
        text += f"\n{len(found)} of {len(cases)} cases are wrong, of {', '.join(dict.fromkeys(case.operator for case, _ in found))}"
        common = set.intersection(*({case.first, case.second} for case, _ in found))
        if common and not all(common & {case.first, case.second} for case in cases):
            text += f"; all of them have an operand on {' and one on '.join(sorted(common))}"
    raise DeviceMismatch(text, ranks=sorted({rank for _, error in found for rank in error.ranks})) from first


_ROUNDED = frozenset(
    (
        "layer_norm",
        "batch_norm",
        "attention",
        "cross_entropy",
        "cross_entropy weight",
        "Linear",
        "Conv2d",
        "BatchNorm2d",
        "LayerNorm",
        "GRU",
        "Sequential",
    )
)
"""Operators whose results are not whole numbers, and may be rounded otherwise on a GPU; of the others every number is exact."""


def assert_right_on_each(devices: Sequence[torch.device], rows: int, seed: int) -> int:
    """Assert that each operator of the table, with all operands on one device, gives there what it gives on the CPU.

    Returns:
        how many operators there are.

    Raises:
        DeviceMismatch: naming the devices that are wrong, the operator and the first wrong element.
    """
    __tracebackhide__ = True
    wrong: list[Wrong] = []
    for operator in CALLS:
        expected = _alone(operator, torch.device("cpu"), rows, seed)
        kind: Kind = "close" if operator in _ROUNDED else "numbers"
        for device in devices:
            try:
                got = _alone(operator, device, rows, seed)
            except Exception as error:
                what = f"it raised {type(error).__name__}: {error}"
            else:
                what = _different(got, expected, device, kind)
            if what:
                wrong.append(Wrong(device, f"{operator} of float32, {rows} rows", what))
    if wrong:
        raise named_wrong(wrong, devices, len(CALLS))
    return len(CALLS)


def _alone(operator: str, device: torch.device, rows: int, seed: int) -> object:
    """Return what an operator gives where all its operands are on one device; modules are made with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _call(OperatorCase(operator, str(device), str(device), rows, seed), device, device)


def _different(got: object, expected: object, device: torch.device, kind: Kind) -> str:
    if isinstance(got, tuple) and isinstance(expected, tuple):
        return next(filter(None, (_different(*pair, device, kind) for pair in zip(got, expected, strict=True))), "")
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return "" if got == expected else f"expected {expected!r}, got {got!r}"
    return f"its result is on {got.device}" if got.device != device else difference(got, expected, kind)


def assert_arrives(source: torch.Tensor, target: torch.Tensor, copied: torch.Tensor) -> None:
    """Assert that `copied`, what copying `source` over `target` gave, holds the source's bits on the target's device.

    Args:
        source, target: same shape and dtype, any layouts and devices.

    Raises:
        DeviceMismatch: naming both devices.
    """
    __tracebackhide__ = True
    what = f"a copy from {source.device} (strides {source.stride()}) to {target.device} (strides {target.stride()})"
    _require(what, copied, source, target.device)


def _prepared(case: OperatorCase, first: torch.device, second: torch.device) -> Callable[[], object]:
    return CALLS[case.operator](Operands(first, second, case.rows, case.seed))


def _call(case: OperatorCase, first: torch.device, second: torch.device) -> object:
    result = _prepared(case, first, second)()
    # A GPU reports what went wrong in a kernel at the next synchronisation, which is to be inside the caller's context.
    for device in {first, second}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result


def _require(what: str, got: object, expected: object, device: torch.device) -> None:
    ranks = indices_of(device)
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if got != expected:
            raise DeviceMismatch(f"{what} gave {got!r}, expected {expected!r}", ranks=ranks)
        return
    if got.device != device:
        raise DeviceMismatch(f"{what} is on {got.device}, expected it on {device}", ranks=ranks)
    if not same_bits(expected, got):
        raise DeviceMismatch(f"{what} gave {got.to('cpu')}, expected {expected.to('cpu')}", ranks=ranks)


@contextlib.contextmanager
def _described(what: str, *devices: torch.device) -> Iterator[None]:
    """Turn an error of something that must work into a finding that says what it was."""
    try:
        yield
    except Exception as error:
        raise DeviceMismatch(
            f"{what} must work, but raised {type(error).__name__}: {error}", ranks=indices_of(*devices)
        ) from error


@contextlib.contextmanager
def _refusal(pair: tuple[torch.device, torch.device], names: tuple[str, ...], operator: str = "") -> Iterator[None]:
    __tracebackhide__ = True
    where = f"{operator or 'the block'}, with operands on {pair[0]} and {pair[1]},"
    ranks = indices_of(*pair)
    try:
        yield
    except RuntimeError as error:
        missing = [str(device) for device in pair if not _is_named(device, str(error), pair, names)]
        if missing:
            raise DeviceMismatch(
                f"{where} raised an error that does not name {' and '.join(missing)}: {error}", ranks=ranks
            ) from error
        return
    except Exception as error:
        raise DeviceMismatch(
            f"{where} must raise RuntimeError, but raised {type(error).__name__}: {error}", ranks=ranks
        ) from error
    raise DeviceMismatch(f"{where} must raise RuntimeError, but raised nothing", ranks=ranks)


def _is_named(
    device: torch.device, message: str, pair: tuple[torch.device, torch.device], names: tuple[str, ...]
) -> bool:
    if _INDEXED.search(message) and "indexed" in names:
        # It is about an index that is not on the CPU, so the device left over is that of the index.
        (indexed,) = devices_named(message)
        others = [one for one in pair if not _matches(one, indexed)]
        return len(others) == 1 and others[0].type != "cpu"
    if _TYPES.search(message) and "types" in names:
        return devices_named(message) == {one.type for one in pair}
    return any(_matches(device, name) for name in devices_named(message) if name != "cuda")


def _matches(device: torch.device, name: str) -> bool:
    return str(device) in (name, name.partition(":")[0])
