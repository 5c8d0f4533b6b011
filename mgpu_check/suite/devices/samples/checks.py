"""Check that operators give the same results and gradients on devices as on the CPU, on torch's own samples."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mgpu_check.asserts.findings import enough
from mgpu_check.simulated.state import active_node
from mgpu_check.suite.common.agreement import WrongCase, difference, named_wrong
from mgpu_check.suite.common.turns import in_turns
from mgpu_check.suite.devices.samples.rules import AMOUNTS, EXACT, OWN_LAYOUT, UNDETERMINED, Amount, named, reason_for
from mgpu_check.suite.devices.samples.running import LAYOUTS, allowed, results, sizes
from mgpu_check.suite.devices.samples.source import SampledOperator, operators
from mgpu_check.torch_hooks.precision import repeatable
from mgpu_check.torch_hooks.tensors import name_of

_ENOUGH = 100
"""Wrong cases that stop a run. They are of many operators, because operators take turns."""


@dataclass(frozen=True)
class SampleCase:
    """A sample of an operator.

    Attributes:
        operator, path: its name in torch's table, and the function that is called: its own, or an alias.
        dtype: the name of the dtype.
        number: the number of the sample.
        layout: 0 for the layouts of the sample; another number gives each operand another one.
        seed: for the elements of the sample.
    """

    operator: str
    path: str
    dtype: str
    number: int
    layout: int
    seed: int


class _JudgedSample:
    """A sample with its results on the CPU."""

    def __init__(self, case: SampleCase, sample: Any) -> None:
        self.case, self.sample = case, sample
        operator = operators()[case.operator]
        self.call = operator.call(case.path)
        on_cpu = results(sample, operator.call(operator.paths[0]), torch.device("cpu"))
        self.forward, self.right = len(on_cpu[0]), [*on_cpu[0], *on_cpu[1]]

    @cached_property
    def bounds(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The references in float64 with the largest errors; those on the CPU where float64 does not work."""
        dtype = getattr(torch, self.case.dtype)
        try:
            return allowed(self.sample, self.call, dtype, self.right)
        except Exception:  # an operator without float64, or one that a mode cannot run
            return [(one, torch.zeros(())) for one in self.right]

    def judged(self, device: torch.device) -> str | None:
        """Describe the error of a device; "" if it is right; None if no device accepts this layout."""
        try:
            forward, gradients = results(self.sample, self.call, device, self.case.layout)
            torch.cuda.synchronize(device)
        except Exception as error:
            return None if self._cpu_refuses() else f"it raised {type(error).__name__}: {error}"
        got = [*forward, *gradients]
        if len(forward) != self.forward or len(got) != len(self.right):
            return f"it gave {len(forward)} tensors and {len(gradients)} gradients, expected {self.forward} and " + str(
                len(self.right) - self.forward
            )
        for number, (one, right) in enumerate(zip(got, self.right, strict=True)):
            if what := self._different(number, one, right, device):
                return what
        return ""

    def _cpu_refuses(self) -> bool:
        try:
            results(self.sample, self.call, torch.device("cpu"), self.case.layout)
        except Exception:
            return True
        return False

    def _different(self, number: int, got: torch.Tensor, right: torch.Tensor, device: torch.device) -> str:
        gradient = number - self.forward
        undetermined = (found for names, found in UNDETERMINED.items() if named(self.case.operator, names))
        if gradient < 0 and number in next(undetermined, ()):
            return ""
        what = f"it is on {got.device}" if got.numel() and got.device != device else difference(got, right, "numbers")
        if what and (gradient >= 0 or not named(self.case.operator, EXACT)) and got.shape == right.shape:
            reference, error = self.bounds[number]
            what = difference(got, right, "close", error) and difference(got, reference, "close", error)
        several = f"result {number}: " if self.forward > 1 else ""
        return (f"gradient {gradient}: " if gradient >= 0 else several) + what if what else ""


def assert_samples_agree(devices: Sequence[torch.device], seed: int, level: str) -> int:
    """Assert that operators give the results and gradients of the CPU on torch's samples; return the number of runs.

    Raises:
        DeviceMismatch: naming devices, function, dtype, shapes and options, and the first wrong element.
        unittest.SkipTest: the samples cannot be imported.
    """
    tally = _SampleTally(devices)
    amount = AMOUNTS[level]
    mine = list(operators().values())[seed % amount.share :: amount.share]
    with repeatable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated operators, whose results count too
        # In turns, so that an operator that is wrong in each dtype is found soon.
        for operator, dtype in in_turns([(one, dtype) for dtype in one.dtypes] for one in mine):
            if len(tally.cases) >= _ENOUGH or enough(tally.wrong):
                break
            tally.add(operator, dtype, seed, amount)
    if tally.wrong:
        error = named_wrong(tally.wrong, devices, tally.runs)
        raise type(error)(f"{error}\n{_repeated(tally)}", ranks=error.ranks)
    return tally.runs


class _SampleTally:
    """The runs of samples, and what was wrong."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        node = active_node()
        self.real = node is None or node.backing.type == "cuda"
        self.wrong: list[WrongCase] = []
        self.cases: dict[str, tuple[SampleCase, torch.device]] = {}
        self.runs = 0

    def add(self, operator: SampledOperator, dtype: torch.dtype, seed: int, amount: Amount) -> None:
        """Run samples of an operator in a dtype on their devices."""
        if reason_for(operator.name, {}, real=self.real):
            return
        turn = seed + zlib.crc32(f"{operator.name} {dtype}".encode())
        try:
            samples = operator.samples(dtype, seed, amount.among)
        except Exception:
            return
        for run, number in enumerate(_chosen(len(samples), amount, len(self.devices), turn)):
            layout = 0 if named(operator.name, OWN_LAYOUT) else (turn + run) % len(LAYOUTS)
            path = operator.paths[(turn + run) % len(operator.paths)]
            case = SampleCase(operator.name, path, name_of(dtype), number, layout, seed)
            device = self.devices[(turn + run) % len(self.devices)]
            self._run(case, samples[number], device)

    def _run(self, case: SampleCase, sample: Any, device: torch.device) -> None:
        if reason_for(case.operator, sample.kwargs, real=self.real):
            return
        try:
            reference = _JudgedSample(case, sample)
        except Exception:
            return  # the CPU refuses it
        what = reference.judged(device)
        if what is None:  # no device accepts this layout
            return
        self.runs += 1
        if not what:
            return
        named = f"{case.path} of {case.dtype}, {' and '.join(sizes(sample, case.layout))} (sample {case.number})"
        self.cases[named] = case, device
        self.wrong += [
            WrongCase(one, named, what if one == device else found)
            for one in self.devices
            if (found := what if one == device else reference.judged(one))
        ]


def _chosen(count: int, amount: Amount, devices: int, turn: int) -> Iterator[int]:
    """Yield the numbers of samples to run: evenly apart, from one that the turn chooses."""
    if not count:
        return
    samples = count if amount.samples is None else min(count, amount.samples)
    for run in range(max(samples, devices if amount.every else 0)):
        yield (turn + run % samples * count // samples) % count


def _repeated(tally: _SampleTally) -> str:
    name = tally.wrong[0].case
    case, device = tally.cases[name]
    return (
        f'to repeat it: python -c "from mgpu_check.suite.devices.samples.checks import *; '
        f"print(difference_of({case!r}, '{device}'))\""
    )


def difference_of(case: SampleCase, device: str) -> str:
    """Return how a device differs from the CPU in a case; "" if it does not."""
    operator = operators()[case.operator]
    with repeatable():
        sample = operator.samples(getattr(torch, case.dtype), case.seed, case.number + 1)[case.number]
        return _JudgedSample(case, sample).judged(torch.device(device)) or ""
