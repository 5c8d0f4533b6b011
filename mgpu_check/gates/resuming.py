"""The gate for checkpoints: a resumed run continues like an uninterrupted one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.report import Report
from mgpu_check.errors import RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.hash_seeds import with_seeds_apart
from mgpu_check.gates.restored import Entries, explained
from mgpu_check.gates.worlds import RanksFixture, check_count, check_tolerance, noting, world_sizes_of
from mgpu_check.processes.rank_lists import named
from mgpu_check.processes.scratch import Scratch

if TYPE_CHECKING:
    from mgpu_check.engine.rank_side.rank import Rank

__all__ = ["assert_resume_continues"]

_SEED, _OTHER_SEED = 20, 2_000_003
# Size of the added rounding errors in unit roundoffs: among a million random errors, hardly any exceeds 6 standard
# deviations. They are added in pairs of opposite directions.
_SPREAD, _PAIRS = 6.0, 2


def assert_resume_continues(
    ranks: RanksFixture,
    train: Callable[[Rank, Path, int, int], Any],
    *,
    steps: int = 3,
    world_sizes: Iterable[int] | None = None,
    tolerance: float | None = None,
) -> None:
    """Assert that a run of `steps` steps, saved and resumed for `steps` more, equals one run of 2 * `steps` steps.

    At each world size `train` runs on all ranks: from 0 to 2 * steps, twice; from 0 to steps; and from steps to 2 *
    steps in the directory of that checkpoint. All generators (torch on CPU and devices, Python, and NumPy if imported)
    get the same seeds before the runs from 0, and other seeds before the resumed run. So random numbers that matter
    must be restored, and data or permutations that are made again must be made from seeds of their own.

    On each rank, every entry of the final state must equal that of the uninterrupted run. Bits are compared first. If
    they differ, floating-point numbers may be off by rounding errors. Correct code may round differently after a start:
    DistributedDataParallel reduces in other buckets in its first step. The size of the errors is measured on four more
    uninterrupted runs, with random rounding errors in each operator (Monte Carlo arithmetic: D. S. Parker, UCLA
    CSD-970002, 1997). If two uninterrupted runs differ in some bits, 8 times their largest difference in a tensor is
    granted, too.

    Training is not repeatable if those two runs differ by more than rounding explains: 2^-10 of the largest magnitude
    in a tensor, or 16 unit roundoffs of its dtype if that is more; or if they differ in an entry that is not
    floating-point. The gate then gives no verdict and raises ValueError. Seed every generator that training draws from,
    and do not return values that are not part of the state, such as a time of day.

    The resumed run is a new call in the same processes. Seeds and torch's global settings are those of a fresh rank.
    `train` and the objects that it refers to are sent again with each call, including globals of the test's module and
    of conftests. Globals of modules that ranks import, as of an installed package, stay: `train` must not keep state
    there.

    Generators alone are not judged, since many a loader draws a seed that it does not use. If results differ, the
    report names the generators that the steps draw from. Return their states from `train` to have them compared.

    Args:
        ranks: the fixture.
        train: ``train(rank, directory, start, stop)`` trains from step `start` to before step `stop`. If `start` is
            above 0, it loads the checkpoint of an earlier call from `directory` (a `pathlib.Path`, the same for all
            ranks). At the end it saves there, and overwrites an earlier checkpoint. It returns the state as a mapping
            from names to tensors on any device, numbers, texts, lists and mappings of these, dataclasses, or objects
            with ``state_dict()``: model, optimizer, scheduler, scaler, sampler. Other objects count by their
            attributes. Each rank compares its own part of a DTensor. After a failure `train` is also called with
            `start` equal to `stop`, to see what loading restores.
        steps: number of steps before and after the interruption. An epoch must end within them to test the position in
            the data.
        world_sizes: world sizes to check; default the powers of two from 2 on, and ``ranks.size``.
        tolerance: largest error of an element, as a fraction of the largest magnitude in its tensor, from 0 to below 1.
            It replaces the measured tolerance.

    Raises:
        ScalingMismatch: the resumed run ends with another state; raised at the smallest world size where it does.
            ``.ranks`` are the ranks where the state differs.
        ValueError: an argument is not valid; `train` returns no mapping, or a value that cannot be compared; the later
            steps change nothing; or two uninterrupted runs differ.
    """
    __tracebackhide__ = True
    check_count("assert_resume_continues", "steps", steps)
    check_tolerance("assert_resume_continues", tolerance, by_name=False)
    sizes = world_sizes_of(ranks, world_sizes)
    for size in sizes:
        with Scratch.new("resume") as root:
            _check(ranks, train, steps, size, tolerance, root)
    smallest = min((size for size in sizes if size > 1), default=None)
    if smallest is not None:

        def judge(by: RanksFixture, size: int = smallest) -> None:
            with Scratch.new("resume") as root:
                _check(by, train, steps, size, tolerance, root)

        case: dict[str, object] = {"world size": smallest, "steps": f"{steps} + {steps}"}
        with_seeds_apart(ranks, "assert_resume_continues", (train,), case, judge)


def _check(
    ranks: RanksFixture, train: Callable[..., Any], steps: int, size: int, tolerance: float | None, root: Path
) -> None:
    __tracebackhide__ = True
    from mgpu_check.gates.states import TrainingPart, compare, epochs_of, train_and_keep

    def run(start: int, stop: int, name: str, directory: str, seed: int, **how: Any) -> Path:
        (root / directory).mkdir(exist_ok=True)
        part = TrainingPart(start, stop, root / directory, seed, **how)
        with noting(f"steps {start} to {stop} at world size {size}"):
            problems = ranks.run(train_and_keep, train, part, root / name, size=size)
        for problem in filter(None, problems):
            raise ValueError(problem)
        return root / name

    def compared(got: Path, runs: list[Path], perturbed: Sequence[Path] = ()) -> Entries:
        return Entries(ranks.run(compare, got, runs, half, list(perturbed), tolerance, size=size))

    half = run(0, steps, "half", "checkpoint", _SEED)
    shutil.copytree(root / "checkpoint", root / "saved")
    resumed = run(steps, 2 * steps, "resumed", "checkpoint", _OTHER_SEED)
    whole = [run(0, 2 * steps, name, f"of {name}", _SEED) for name in ("whole", "again")]
    ends = compared(resumed, whole)
    if ends.irreproducible:
        raise ValueError(
            f"two uninterrupted runs of steps 0 to {2 * steps} differ by more than rounding in {ends.irreproducible}; "
            "so a resumed run cannot be judged. Seed each generator that train makes (torch.Generator(), "
            "numpy.random.default_rng()), and do not return values that are not part of the state, such as a time of "
            "day"
        )
    if not ends.state_moves:
        raise ValueError(
            f"train returns the same state after steps 0 to {2 * steps} as after steps 0 to {steps}, so a resumed run "
            "cannot be judged; train from step start to step stop, and return the model and the optimizer"
        )
    remarks = []
    if ends.wrong and tolerance is None:
        # Correct code may round differently after a start: DistributedDataParallel uses other buckets in its first
        # step.
        try:
            perturbed = [
                run(0, 2 * steps, name := f"perturbed {signs}{sign}", f"of {name}", _SEED, spread=spread, signs=signs)
                for signs in range(_PAIRS)
                for sign, spread in (("+", _SPREAD), ("-", -_SPREAD))
            ]
            ends = compared(resumed, whole, perturbed)
        except (RankFailure, RankHang, ValueError) as error:
            remarks.append(
                f"compared bit for bit, because the size of rounding errors could not be measured: {_first(error)}"
            )
    if not ends.wrong:
        return
    loaded = None
    try:
        # Without steps in between, one rank may save while another still loads: each gets its own copy.
        for rank in range(size):
            shutil.copytree(root / "saved", root / "apart" / str(rank))
        loaded = compared(run(steps, steps, "loaded", "apart", _OTHER_SEED, apart=True), [half])
    except (RankFailure, RankHang, ValueError) as error:
        # The failure is already proven; this run only explains it.
        call = f"train(rank, directory, {steps}, {steps})"
        remarks.append(f"what loading restores could not be seen: {call}: {_first(error)}")
    attempts = Attempts()
    epochs = ranks.run(epochs_of, [whole[0], half, resumed], size=size)
    observables, findings = explained(ends, loaded, attempts, epochs)
    entry, detail, wrong = ends.first_wrong
    report = Report(
        f"training resumed at step {steps} does not continue at world size {size}: after step {2 * steps}, {entry} on "
        f"{named(wrong)}: {detail}",
        {"world size": size, "steps": f"{steps} + {steps}"},
        observables,
        findings,
        [*remarks, *attempts.remarks],
    )
    raise ScalingMismatch(str(report), ranks=ends.wrong_ranks, mistakes=report.mistakes)


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
