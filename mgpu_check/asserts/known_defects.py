"""List known defects of torch and of the libraries below it: condition, upstream report, and the checks that show it.

To add a defect, add a `KnownDefect` to `_TABLE`, and mark the code that may meet it, in the process that computes::

    with known_defect("gloo-views-with-gaps", contiguous=tensor.is_contiguous(), size=rank.size):
        assert_allreduce_matches(...)

A failure in the block is reported as KNOWN, with the link. The check continues, and its example counts as passed. The
failure is raised as usual in four cases: the facts do not meet the condition, this version of torch does not have the
defect, the exception is of another kind, or `explained` shows that the defect would have another result. If the
condition holds and nothing fails, the run reports that the defect did not show. A check that collects errors and raises
later calls `is_known` instead.

A check also reports here the cases that it leaves out because this torch or these devices lack something. The closing
table names them, and a pass does not speak for them. Any process may report::

    left_out("interpolate", "this torch does not have it for all placements")
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.version import torch_version

T = TypeVar("T")


class Hearing(Generic[T]):
    """A channel from checks to at most one listener, the one whose context was entered last.

    This module makes two when it is imported, for cases left out and for defects met; they live as long as the process.
    """

    def __init__(self) -> None:
        self._hear: Callable[[T], None] | None = None

    @property
    def heard(self) -> bool:
        """Whether the channel has a listener."""
        return self._hear is not None

    def heard_by(self, hear: Callable[[T], None]) -> AbstractContextManager[None]:
        """Call `hear` with each fact that is passed to `tell`, for the time of the context."""
        return replaced(self, "_hear", hear)

    def tell(self, entry: T) -> None:
        """Pass a fact to the listener, if there is one."""
        if self._hear is not None:
            self._hear(entry)


_cases = Hearing[tuple[str, str]]()

heard_by = _cases.heard_by
"""Call a function with the cases that checks in this process leave out, for the time of the context."""


def left_out(case: str, reason: str) -> None:
    """Report a case that was left out, and why. Equal reports of several ranks count once."""
    _cases.tell((case, reason))


@dataclass(frozen=True)
class KnownDefect:
    """A defect of another project that a check meets."""

    name: str  # lower-case words joined by hyphens
    summary: str  # a clause that describes the defect
    link: str  # the upstream report
    shown_by: tuple[str, ...]  # the checks that meet it: ``"test_allreduce.py::test_all_reduce_of_views_on_the_cpu"``
    # takes the facts from the check as keyword arguments, and returns whether the defect occurs
    strikes: Callable[..., bool]
    since: str = ""  # the first version of torch with the defect, "" if every version has it
    fixed: str = ""  # the first version without it, "" if it is not fixed

    def is_in(self, version: str) -> bool:
        """Return whether this version of torch has the defect."""
        numbers = _numbers(version)
        return _numbers(self.since) <= numbers and (not self.fixed or numbers < _numbers(self.fixed))


_TABLE = (
    KnownDefect(
        "gloo-views-with-gaps",
        "gloo reduces a CPU view with gaps as if it had none, silently",
        "https://github.com/pytorch/pytorch/issues/192920",
        shown_by=("test_allreduce.py::test_all_reduce_of_views_on_the_cpu",),
        strikes=lambda contiguous, size: not contiguous and size > 1,
    ),
    KnownDefect(
        "data-parallel-autocast-dtype",
        "the threads of DataParallel do not inherit the dtype of autocast, and compute in float16",
        "https://github.com/pytorch/pytorch/pull/63416",
        shown_by=("test_data_parallel.py::test_autocast_dtype",),
        strikes=lambda dtype, devices: dtype == "bfloat16" and devices > 1,
    ),
    KnownDefect(
        "gloo-adds-booleans-as-bytes",
        "gloo adds booleans as bytes: true + true leaves a 2 in a tensor of booleans",
        "https://github.com/pytorch/pytorch/pull/105354",
        shown_by=(
            "test_collectives.py::test_all_reduce_of_every_dtype",
            "test_collectives.py::test_reductions_of_every_dtype",
        ),
        strikes=lambda function, dtype, op, place, size: (
            (dtype, op, place) == ("bool", "SUM", "cpu") and size > 1 and function != "reduce_scatter_tensor"
        ),
    ),
    KnownDefect(
        "nccl-reduce-scatter-alone",
        "in a group of one rank, reduce_scatter on a device ignores the factor of PREMUL_SUM, and writes nothing to a "
        "tensor that is not contiguous",
        "https://github.com/pytorch/pytorch/pull/170922",
        shown_by=("test_collectives.py::test_reductions_of_every_dtype", "test_collectives.py::test_layouts"),
        strikes=lambda function, op, place, contiguous, size: (
            function.startswith("reduce_scatter")
            and (place, size) == ("device", 1)
            and (op == "PREMUL_SUM" or not contiguous)
        ),
    ),
    KnownDefect(
        "lazy-signs-between-devices",
        "copy_ between the CPU and a GPU, either way, drops a lazy negation, or a lazy conjugation if it copies to "
        "several places",
        "https://github.com/pytorch/pytorch/issues/146286",
        shown_by=("test_devices.py::test_copies_of_every_dtype",),
        strikes=lambda call, complex_numbers, source, target: (
            (call == "copy_ to three places" or (call.startswith(("copy_", "assignment")) and not complex_numbers))
            and (source == "cpu") != (target == "cpu")
        ),
    ),
    KnownDefect(
        "dtensor-mean-of-unequal-parts",
        "losses of DTensors average the means of parts, even if the parts have unequal sizes",
        "https://github.com/pytorch/pytorch/issues/162692",
        shown_by=("test_sharded.py::test_losses_of_dtensors",),
        strikes=lambda loss, even, size: loss in ("mse_loss", "huber_loss", "smooth_l1_loss") and not even and size > 1,
    ),
    KnownDefect(
        "dtensor-weighted-mean-of-parts",
        "nll_loss of DTensors averages the weighted means of parts, whose weights differ",
        "https://github.com/pytorch/pytorch/issues/185167",
        shown_by=("test_sharded.py::test_losses_of_dtensors",),
        strikes=lambda loss, even, size: loss in ("weighted nll_loss", "nll_loss with ignored classes") and size > 1,
        fixed="2.14.1",
    ),
    KnownDefect(
        "dtensor-fills-each-part",
        "fill_ of a partial DTensor fills the part of each rank, so the sum of the parts is a multiple of the value",
        "https://github.com/pytorch/pytorch/issues/163374",
        shown_by=("test_sharded.py::test_operators_on_dtensors",),
        strikes=lambda size: size > 1,
    ),
)

KNOWN_DEFECTS = {defect.name: defect for defect in _TABLE}
"""Name -> known defect."""


@dataclass(frozen=True)
class Met:
    """A known defect that was met, and whether it showed."""

    name: str
    failed: bool


_met = Hearing[Met]()

reported_to = _met.heard_by
"""Call a function with each known defect that this process meets, for the time of the context.

Without it no defect counts as known, and failures are raised.
"""

report = _met.tell
"""Report a known defect that another process has met, if this process has a listener."""


def is_known(name: str, *, failed: bool, **facts: Any) -> bool:
    """Return whether the defect `name` occurs under `facts`, and report whether it has shown (`failed`)."""
    if name not in KNOWN_DEFECTS:
        raise ValueError(f"known_defect: {name!r} is unknown; choose one of {', '.join(KNOWN_DEFECTS)}")
    defect = KNOWN_DEFECTS[name]
    if not _met.heard or not defect.strikes(**facts) or not defect.is_in(torch_version()):
        return False
    report(Met(name, failed))
    return True


@contextlib.contextmanager
def known_defect(name: str, *, explained: Callable[[], object] | None = None, **facts: Any) -> Iterator[None]:
    """Report a failure in the context as known, if the defect `name` occurs under `facts`.

    Args:
        explained: called after a failure; raises an `AssertionError` if the defect would have another result. A check
            of a result should pass it, so that this defect does not hide another one.
        facts: the arguments of the defect's condition.
    """
    try:
        yield
    except Exception as error:
        is_finding = isinstance(error, AssertionError) or isinstance(error.__cause__, AssertionError)
        if name not in KNOWN_DEFECTS or not is_finding:
            raise
        if explained is not None:
            try:
                explained()
            except AssertionError:
                raise error from error.__cause__
        if not is_known(name, failed=True, **facts):
            raise
    else:
        is_known(name, failed=False, **facts)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) for "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
