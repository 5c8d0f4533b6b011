"""Check operators with operands on different devices: they must work, or raise an error that names both devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.mismatch import raises_device_mismatch, refusal
from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.devices.mixed_operands import OPERATORS, Operands, OperatorCase
from mgpu_check.torch_hooks.tensors import indices_of

_CPU = torch.device("cpu")


def assert_refused(case: OperatorCase) -> None:
    """Assert that the operator of `case` works on one device, and that its error for the two devices names both."""
    first, second = torch.device(case.first), torch.device(case.second)
    with _described(f"{case.operator} with all operands on {first}", first, first):
        _call(case, first, first)
    call = _prepared(case, first, second)
    with refusal((first, second), ("both", case.rule.names), case.operator):
        call()


def assert_works(case: OperatorCase) -> None:
    """Assert that the operator of `case` works across its two devices: the CPU's bits on the right device."""
    first, second = torch.device(case.first), torch.device(case.second)
    expected = _call(case, _CPU, _CPU)
    subject = f"{case.operator} of operands on {first} and {second}"
    with _described(subject, first, second):
        got = _call(case, first, second)
    place = case.rule.result if case.rule.result is not None else int(first.type != "cuda")
    device = (first, second)[place]
    ranks = indices_of(device)
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if got != expected:
            raise DeviceMismatch(f"{subject} gave {got!r}, expected {expected!r}", ranks=ranks)
        return
    if got.device != device:
        raise DeviceMismatch(f"{subject} is on {got.device}, expected it on {device}", ranks=ranks)
    if not same_bits(expected, got):
        raise DeviceMismatch(f"{subject} gave {got.to('cpu')}, expected {expected.to('cpu')}", ranks=ranks)


def assert_each_refused(cases: Sequence[OperatorCase]) -> None:
    """Assert of each case what `assert_refused` asserts, and report the devices that all wrong cases share."""
    _each(cases, assert_refused)


def assert_each_works(cases: Sequence[OperatorCase]) -> None:
    """Assert of each case what `assert_works` asserts, and report the devices that all wrong cases share."""
    _each(cases, assert_works)


def _each(cases: Sequence[OperatorCase], check: Callable[[OperatorCase], None]) -> None:
    failures: list[tuple[OperatorCase, DeviceMismatch]] = []
    for case in cases:
        try:
            check(case)
        except DeviceMismatch as error:
            failures.append((case, error))
    if not failures:
        return
    earliest = failures[0][1]
    text = str(earliest)
    if len(cases) > 1:
        operators = ", ".join(dict.fromkeys(case.operator for case, _ in failures))
        text += f"\n{len(failures)} of {len(cases)} cases are wrong, of {operators}"
        common = set.intersection(*({case.first, case.second} for case, _ in failures))
        if common and not all(common & {case.first, case.second} for case in cases):
            text += f"; all of them have an operand on {' and one on '.join(sorted(common))}"
    raise DeviceMismatch(text, ranks=sorted({rank for _, error in failures for rank in error.ranks})) from earliest


def assert_data_parallel_refuses(devices: Sequence[torch.device], rows: int) -> None:
    """Assert that DataParallel over two `devices` refuses a module on the second, with an error that names both."""
    model = nn.DataParallel(nn.Linear(3, 2).to(devices[1]), device_ids=list(devices))
    with raises_device_mismatch(*devices):
        model(torch.ones(rows, 3))


def _prepared(case: OperatorCase, first: torch.device, second: torch.device) -> Callable[[], object]:
    return OPERATORS[case.operator].build(Operands(first, second, case.rows, case.seed))


def _call(case: OperatorCase, first: torch.device, second: torch.device) -> object:
    result = _prepared(case, first, second)()
    # A GPU reports the error of a kernel at the next synchronisation, which must be inside the caller's context.
    for device in {first, second}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result


@contextlib.contextmanager
def _described(subject: str, *devices: torch.device) -> Iterator[None]:
    """Turn an exception of code that must work into a `DeviceMismatch` that names the code."""
    try:
        yield
    except Exception as error:
        text = f"{subject} must work, but raised {type(error).__name__}: {error}"
        raise DeviceMismatch(text, ranks=indices_of(*devices)) from error
