"""The gate for checkpoints: a resumed run continues like an uninterrupted one, on as many ranks or on others.

What a resumed run did not restore is found from the entries that differ.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mgpu_check.diagnosis.evidence import Restored
from mgpu_check.diagnosis.report import Attempts, Finding, Observable, Report
from mgpu_check.diagnosis.rules.order import findings_of_checkpoint
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import NotCompared, RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates import gate_arguments
from mgpu_check.gates.gate_arguments import RanksFixture, definition_of, first_line, noting, world_sizes_of
from mgpu_check.gates.run import states
from mgpu_check.gates.run.states import StateEntry, StateRow
from mgpu_check.gates.search.hash_seeds import with_seeds_apart
from mgpu_check.gates.search.scenarios import Place, check_places, where_is
from mgpu_check.processes.rank_lists import by_ranks, named
from mgpu_check.processes.scratch import Scratch

_SHOWN = 4
_LOADED = "loaded as saved"


class Entries:
    """The entries of the state, as compared on each rank.

    The gate makes one from the rows that `states.compare` returns on the ranks; `explained` reads up to three of them.
    """

    def __init__(self, rows: Sequence[Sequence[StateRow]]) -> None:
        self.size = len(rows)
        self.by_name: dict[StateEntry, dict[int, StateRow]] = {}
        for rank, of_rank in enumerate(rows):
            for row in of_rank:
                self.by_name.setdefault(row.entry, {})[rank] = row

    @property
    def irreproducible(self) -> str | None:
        """A description of the entries that differ between two uninterrupted runs by more than rounding, if any do."""
        several = {name: [n for n, row in rows.items() if not row.repeats] for name, rows in self.by_name.items()}
        differing = {name: ranks for name, ranks in several.items() if ranks}
        for name, ranks in differing.items():
            return f"{by_ranks(differing, _SHOWN)}: {name}: {self.by_name[name][ranks[0]].detail}"
        return None

    @property
    def state_moves(self) -> bool:
        """True if any comparable entry has changed since the earlier state."""
        rows = (row for rows in self.by_name.values() for row in rows.values())
        return any(row.moved and row.same is not None and not row.entry.generator for row in rows)

    @cached_property
    def wrong(self) -> dict[StateEntry, list[int]]:
        return {name: ranks for name in self.by_name if not name.generator and (ranks := self.ranks_wrong(name))}

    def ranks_wrong(self, name: StateEntry) -> list[int]:
        return [rank for rank, row in self.by_name.get(name, {}).items() if row.same is False]

    def ranks_right(self, name: StateEntry) -> list[int]:
        return [rank for rank, row in self.by_name.get(name, {}).items() if row.same]

    def drawn(self, name: StateEntry) -> bool:
        """Return whether the later steps draw from this generator on any rank."""
        return any(row.moved for row in self.by_name[name].values())

    def parted(self, name: StateEntry) -> bool:
        """Return whether ranks differ that should agree."""
        rows = self.by_name[name].values()
        return len({row.expected for row in rows}) == 1 and len({row.got for row in rows}) > 1

    def is_rank_0s(self, name: StateEntry) -> bool:
        """Return whether the wrong ranks have the value that is right for rank 0."""
        rows, wrong_ranks = self.by_name[name], self.ranks_wrong(name)
        right_value = rows[0].expected if 0 in rows and 0 not in wrong_ranks else None
        return right_value is not None and all(rows[n].got == right_value for n in wrong_ranks)


def explained(
    ends: Entries,
    loaded: Entries | None,
    attempts: Attempts,
    epochs: Sequence[Sequence[Sequence[int]]] = (),
    resharded: Mapping[StateEntry, str] = MappingProxyType({}),
    fresh: Entries | None = None,
    of_steps: Mapping[int, Entries] = MappingProxyType({}),
) -> tuple[list[Observable], list[Finding], list[str]]:
    """Return the table row of each entry, the likely causes, and the facts that prove no cause.

    Args:
        ends: compares the end of the resumed run with the uninterrupted run.
        loaded: compares the states right after loading with the saved ones; None if loading could not be observed.
        epochs: for each rank, the epochs of samplers in the uninterrupted run, before the interruption, and after it.
        resharded: `Restored.resharded`.
        fresh: compares the states right after loading with those of a run that loads nothing; None if that failed.
        of_steps: compares the states right after loading with those of uninterrupted runs until other steps.
    """
    observables = []
    drawn = [name for name in ends.by_name if name.generator and ends.drawn(name)]
    for name in ends.by_name:
        if name.generator and name not in drawn:
            continue
        relations: dict[str, bool | None] = {"continues": _holds(ends, name)}
        if ends.size > 1:
            relations["ranks agree as before"] = not ends.parted(name)
        detail = _detail(ends, name)
        if loaded is not None:
            relations[_LOADED] = _holds(loaded, name)
            detail = detail or _detail(loaded, name, "after loading ")
        observables.append(Observable(str(name), relations, detail))
    # Show entries that were lost in loading first: they are the cause, and a report shows only a few rows.
    observables.sort(key=lambda observable: observable.relations.get(_LOADED) is not False)
    altered = {} if loaded is None else _altered(ends, loaded, fresh, resharded)
    # An entry may be that of an earlier or a later step, on all ranks.
    steps = {
        name: step
        for step, state in of_steps.items()
        for name in altered
        if not state.ranks_wrong(name) and state.ranks_right(name)
    }
    pieces = drawn, _epochs(epochs) or "", resharded, altered, steps
    evidence = attempts.of("the evidence", None, _evidence, ends, loaded, *pieces)
    facts = [f"right after loading, not as saved: {by_ranks(altered, _SHOWN)}"] if altered else []
    return observables, [] if evidence is None else findings_of_checkpoint(evidence, attempts), facts


def _altered(
    ends: Entries, loaded: Entries, fresh: Entries | None, resharded: Mapping[StateEntry, str]
) -> dict[StateEntry, list[int]]:
    """Return the entries that loading changed to other values than the saved ones, with those ranks."""
    altered = {}
    for name, ranks in loaded.wrong.items():
        # An entry that was not restored is missing, or has its value of a run without a checkpoint.
        unrestored_ranks = [] if fresh is None else fresh.ranks_right(name)
        altered_ranks = [rank for rank in ranks if rank not in unrestored_ranks and loaded.by_name[name][rank].got]
        if altered_ranks and name not in resharded and _holds(ends, name) is not None and not loaded.is_rank_0s(name):
            altered[name] = altered_ranks
    return altered


def _epochs(of_ranks: Sequence[Sequence[Sequence[int]]]) -> str | None:
    """Describe a sampler whose epoch does not follow from the interrupted run, if there is one."""
    for rank, (uninterrupted, before, after) in enumerate(of_ranks):
        # Training may continue in the interrupted epoch or in the next one, or repeat earlier epochs.
        expected = [uninterrupted[start:] for start in range(min(len(before), len(uninterrupted)) + 1)]
        if after and list(after) not in [list(epochs) for epochs in expected] and len(after) <= len(uninterrupted):
            return (
                f"DistributedSampler continues with epoch {after[0]} on rank {rank}, and with epoch "
                f"{uninterrupted[-len(after)]} in the uninterrupted run"
            )
    return None


def _evidence(
    ends: Entries,
    loaded: Entries | None,
    drawn: Sequence[StateEntry],
    epochs: str,
    resharded: Mapping[StateEntry, str],
    altered: Mapping[StateEntry, Sequence[int]],
    of_other_steps: Mapping[StateEntry, int],
) -> Restored:
    lost_numbers = {name: ranks for name in drawn if (ranks := (loaded or ends).ranks_wrong(name))}
    mismatches = {} if loaded is None else loaded.wrong
    lost = {n: r for n, r in mismatches.items() if _holds(ends, n) is not None and n not in (*resharded, *altered)}
    if loaded is not None and (lost or lost_numbers or resharded or altered):
        both = {**lost, **lost_numbers}
        partly = {name: ranks for name, ranks in both.items() if len(ranks) < len(loaded.by_name[name])}
        of_rank_0 = {name: ranks for name, ranks in partly.items() if loaded.is_rank_0s(name)}
        return Restored(
            seen=True,
            epochs="" if lost or resharded else epochs,
            on_some={name: ranks for name, ranks in partly.items() if name not in of_rank_0},
            nowhere=[name for name in (*lost, *lost_numbers) if name not in partly],
            of_rank_0=of_rank_0,
            numbers_of_rank_0={name: ranks for name, ranks in of_rank_0.items() if name.generator},
            resharded=resharded,
            altered=altered,
            of_other_steps=of_other_steps,
        )
    parted = {name: ranks for name, ranks in ends.wrong.items() if ends.parted(name)}
    return Restored(
        seen=loaded is not None,
        epochs=epochs,
        parted=parted,
        right_on_rank_0={n: r for n, r in ends.wrong.items() if 0 in ends.ranks_right(n) and n not in parted},
        at_the_end=[*ends.wrong, *lost_numbers],
    )


def _holds(entries: Entries, name: StateEntry) -> bool | None:
    verdicts = [row.same for row in entries.by_name.get(name, {}).values()]
    return False if False in verdicts else None if None in verdicts or not verdicts else True


def _detail(entries: Entries, name: StateEntry, when: str = "") -> str:
    wrong_ranks = entries.ranks_wrong(name)
    if not wrong_ranks:
        return next((row.detail for row in entries.by_name.get(name, {}).values() if row.same is None), "")
    description = "other numbers follow" if name.generator else entries.by_name[name][wrong_ranks[0]].detail
    return f"{when}{named(wrong_ranks)}: {description}"


_GATE = "assert_resume_continues"
_SEED, _OTHER_SEED = 20, 2_000_003
# Size of the added rounding errors in unit roundoffs: among a million random errors, hardly any exceeds 6 standard
# deviations. They are added in pairs of opposite directions.
_SPREAD, _PAIRS = 6.0, 2

World = int | Mapping[str, int]  # a number of ranks, or the axes of a mesh and their sizes


def assert_resume_continues(
    ranks: RanksFixture,
    train: Callable[[Rank, Path, int, int], Any],
    *,
    steps: int = 3,
    world_sizes: Iterable[int] | None = None,
    tolerance: float | None = None,
    save_on: World | Iterable[World] | None = None,
    load_on: World | Iterable[World] | None = None,
) -> None:
    """Assert that a run of `steps` steps, saved and resumed for `steps` more, equals one run of 2 * `steps` steps.

    At each world size `train` runs on all ranks: from 0 to 2 * steps, twice; from 0 to steps; and from steps to 2 *
    steps in the directory of that checkpoint. If that continues, the run is interrupted twice: it is resumed from steps
    to a step in the middle of the second half, and from there to 2 * steps. That is left out with `save_on` or
    `load_on`. All generators (torch on CPU and devices, Python, and NumPy if imported) get the same seeds before the
    runs from 0, and other seeds before the resumed runs. So random numbers that matter must be restored, and data or
    permutations that are made again must be made from seeds of their own.

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

    With `save_on` or `load_on`, some ranks save and others resume, for each pair of world sizes or meshes. The resumed
    run is compared with an uninterrupted run on the ranks that load. So the steps of `train` must be the same at any
    world size, as `assert_step_scales` checks, and random numbers must not differ between ranks. After a failure the
    gate compares uninterrupted runs on the ranks that save and that load. If these differ, the checkpoint is not at
    fault, and the gate raises ValueError.

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
            the data. With 1 there is no second interruption.
        world_sizes: world sizes to check; default the powers of two from 2 on, and ``ranks.size``.
        tolerance: largest error of an element, as a fraction of the largest magnitude in its tensor, from 0 to below 1.
            It replaces the measured tolerance.
        save_on: world sizes or meshes that save, one or several: ``[1, 2]``, ``{"dp": 2}``. In a mesh, ``rank.mesh`` is
            the `DeviceMesh`. It replaces `world_sizes`. Default, if `load_on` is given: that of `world_sizes`.
        load_on: world sizes or meshes that load: ``[4, {"dp": 2, "tp": 2}]``. Default, if `save_on` is given: that of
            `world_sizes`.

    Raises:
        ScalingMismatch: the resumed run ends with another state; raised at the smallest world size where it does.
            ``.ranks`` are the ranks where the state differs.
        NotCompared: a run that is resumed on other ranks ends with another state, and no entry of the state shows
            whether `train` itself is the same on those ranks.
        ValueError: an argument is not valid; `train` returns no mapping, or a value that cannot be compared; the later
            steps change nothing; or two uninterrupted runs differ.
    """
    gate_arguments.check_count(_GATE, "steps", steps)
    gate_arguments.check_tolerance(_GATE, tolerance, by_name=False)
    if save_on is None and load_on is None:
        groups: list[list[tuple[Place, Place]]] = [
            [((size, ()), (size, ()))] for size in world_sizes_of(ranks, world_sizes)
        ]
    elif world_sizes is not None:
        raise ValueError(f"{_GATE}: world_sizes and save_on or load_on are both given; leave world_sizes out")
    else:
        saving, loading = (
            [(size, ()) for size in world_sizes_of(ranks, None)]
            if worlds is None
            else check_places(_GATE, name, worlds, ranks.size)
            for name, worlds in (("save_on", save_on), ("load_on", load_on))
        )
        groups = [[(saved, loaded) for loaded in loading for saved in saving]]
    for group in groups:
        with Scratch.new("resume") as root:
            training = _TrainingRuns(ranks, train, steps, root)
            for saved, loaded in group:
                _check(training, saved, loaded, tolerance)
                if saved == loaded:  # a checkpoint of other ranks may leave files that a second one must not read
                    _check(training, saved, loaded, tolerance, interrupted_twice=True)
    smallest = next((pair for group in groups for pair in group if max(pair)[0] > 1), None)
    if smallest is not None:

        def judge(by: RanksFixture, pair: tuple[Place, Place] = smallest) -> None:
            with Scratch.new("resume") as root:
                _check(_TrainingRuns(by, train, steps, root), *pair, tolerance)

        with_seeds_apart(ranks, _GATE, (train,), _case(*smallest, steps), judge)


class _TrainingRuns:
    """The runs of one training. Uninterrupted runs are made once for each number of ranks.

    The gate makes one for each group of worlds, in the scratch directory `root`, which holds all checkpoints and kept
    states and is removed after the last check of the group. `middle` is the step of a second interruption, if there is
    room for one.
    """

    def __init__(self, ranks: RanksFixture, train: Callable[..., Any], steps: int, root: Path) -> None:
        self.ranks, self.train, self.steps, self.root = ranks, train, steps, root
        self.middle = steps + (steps + 1) // 2 if steps > 1 else None
        self.half = cache(lambda world: self.run(world, 0, steps, "half", self.checkpoint(world), _SEED))
        self.whole = cache(lambda world: [self._uninterrupted(world, name) for name in ("whole", "again")])
        self.perturbed = cache(self._perturbed)

    def checkpoint(self, world: Place, copy: str = "checkpoint") -> Path:
        return self._of(world) / copy

    def restored(self, world: Place) -> Path:
        """Return the directory of a checkpoint with the files that the interrupted run has saved there."""
        self.half(world)
        directory, linked = self.checkpoint(world), self.checkpoint(world, "saved with links")
        if linked.exists():
            shutil.rmtree(directory)
            shutil.copytree(linked, directory, symlinks=True)  # a link to the latest file may lead into `directory`
        else:  # no run has resumed here yet
            shutil.copytree(directory, linked, symlinks=True)
            shutil.copytree(directory, self.checkpoint(world, "saved"))
        return directory

    def resumed(self, saved: Place, loaded: Place, interrupted_twice: bool) -> Path:
        """Resume the interrupted run to its end; if `interrupted_twice`, interrupt it once more on the way."""
        directory, start = self.restored(saved), self.steps
        if interrupted_twice:
            assert self.middle is not None
            self.run(loaded, start, self.middle, "resumed", directory, _OTHER_SEED)
            shutil.rmtree(self.checkpoint(saved, "saved again"), ignore_errors=True)
            shutil.copytree(directory, self.checkpoint(saved, "saved again"))
            start = self.middle
        return self.run(loaded, start, 2 * self.steps, "resumed", directory, _OTHER_SEED)

    def halves(self, saved: Place, loaded: Place) -> tuple[Path, int, Path, int]:
        return self.half(saved), saved[0], self.half(loaded), loaded[0]

    def until(self, world: Place, step: int) -> Path:
        """Return the state of an uninterrupted run after `step` steps."""
        return self.half(world) if step == self.steps else self._uninterrupted(world, f"until step {step}", stop=step)

    def loaded(self, saved: Place, loaded: Place, step: int) -> Path:
        """Load the checkpoint of the last interruption on other ranks, without a step."""
        # Without steps in between, one rank may save while another still loads. So each rank gets its own copy.
        copies = self._of(loaded) / "apart"
        shutil.rmtree(copies, ignore_errors=True)
        copy = self.checkpoint(saved, "saved" if step == self.steps else "saved again")
        for rank in range(loaded[0]):
            shutil.copytree(copy, copies / str(rank))
        return self.run(loaded, step, step, "loaded", copies, _OTHER_SEED, per_rank=True)

    def fresh(self, world: Place) -> Path:
        """Return the state of a run that loads nothing and makes no step, under the seed of a resumed run."""
        return self.run(world, 0, 0, "fresh", self._of(world) / "of fresh", _OTHER_SEED)

    def run(self, world: Place, start: int, stop: int, name: str, directory: Path, seed: int, **how: Any) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        training_part = states.TrainingPart(start, stop, directory, seed, world[1], **how)
        kept = self._of(world) / name
        with noting(f"steps {start} to {stop} at {where_is(*world)}"):
            problems = self.ranks.run(states.train_and_keep, self.train, training_part, kept, size=world[0])
        for problem in filter(None, problems):
            raise ValueError(problem)
        return kept

    def _perturbed(self, world: Place) -> list[Path] | RankFailure | RankHang | ValueError:
        """Return the perturbed runs, or their error: the cache keeps it, so that a hang is waited for once."""
        try:
            return [
                self._uninterrupted(world, f"perturbed {signs}{sign}", spread=spread, signs=signs)
                for signs in range(_PAIRS)
                for sign, spread in (("+", _SPREAD), ("-", -_SPREAD))
            ]
        except (RankFailure, RankHang, ValueError) as error:
            return error

    def _uninterrupted(self, world: Place, name: str, stop: int | None = None, **how: Any) -> Path:
        return self.run(world, 0, stop or 2 * self.steps, name, self._of(world) / f"of {name}", _SEED, **how)

    def _of(self, world: Place) -> Path:
        return self.root / where_is(*world)


def _check(
    training: _TrainingRuns, saved: Place, loaded: Place, tolerance: float | None, interrupted_twice: bool = False
) -> None:
    """Check one interruption; with `interrupted_twice` two, of which the first is known to be harmless."""
    ranks, steps, size = training.ranks, training.steps, loaded[0]
    across = saved != loaded

    def compared(got: Path, runs: list[Path], perturbed: Sequence[Path] = (), rounded: bool = False) -> Entries:
        how = list(perturbed), tolerance, rounded
        return Entries(ranks.run(states.compare, got, runs, training.half(loaded), *how, size=size))

    step = training.middle if interrupted_twice else steps
    if step is None:
        ranks._remark(f"{_GATE}: steps={steps} leaves no room for a second interruption; give 2 or more to check one")
        return
    resumed, uninterrupted = training.resumed(saved, loaded, interrupted_twice), training.whole(loaded)
    ends = compared(resumed, uninterrupted)
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
        # Correct code may round differently after a start: DistributedDataParallel rebuilds its buckets before its
        # second step (pytorch/pytorch#44798). Other ranks add in another order.
        try:
            perturbed = training.perturbed(loaded)
            if isinstance(perturbed, BaseException):
                raise perturbed
            ends = compared(resumed, uninterrupted, perturbed)
        except (RankFailure, RankHang, ValueError) as error:
            how = "bit for bit"
            if across:
                how, ends = "up to what rounding could explain at most", compared(resumed, uninterrupted, rounded=True)
            remarks.append(
                f"compared {how}, because the size of rounding errors could not be measured: {first_line(error)}"
            )
    if not ends.wrong:
        return
    entry, wrong_ranks = next(iter(ends.wrong.items()))
    detail = ends.by_name[entry][wrong_ranks[0]].detail
    if across:
        remarks.append(_agreement(training, saved, loaded, entry, tolerance))
    observables, findings, facts = _explanation(training, saved, loaded, step, resumed, ends, compared, remarks)
    twice = f", and again at step {step}," if interrupted_twice else ""
    summary = (
        f"saved at step {steps} at {where_is(*saved)} and resumed at {where_is(*loaded)} does not continue"
        if across
        else f"resumed at step {steps}{twice} does not continue at {where_is(*loaded)}"
    )
    report = Report(
        f"training {summary}: after step {2 * steps}, {entry} on {named(wrong_ranks)}: {detail}",
        _case(saved, loaded, steps, step),
        observables,
        findings,
        remarks,
        known=facts,
        place=definition_of(training.train),
    )
    all_wrong = sorted({rank for ranks_of_entry in ends.wrong.values() for rank in ranks_of_entry})
    raise ScalingMismatch(str(report), ranks=all_wrong, mistakes=report.mistakes, site=report.site)


def _explanation(
    training: _TrainingRuns,
    saved: Place,
    loaded: Place,
    step: int,
    resumed: Path,
    ends: Entries,
    compared: Callable[..., Entries],
    remarks: list[str],
) -> tuple[list[Observable], list[Finding], list[str]]:
    """Load the checkpoint without a step, and return `explained`. `remarks` gets a line on each run that failed."""
    ranks, across, before = training.ranks, saved != loaded, training.half(loaded)
    state, fresh, moved = None, None, {}
    of_steps: dict[int, Entries] = {}
    try:
        before = training.until(loaded, step)
        loaded_path = training.loaded(saved, loaded, step)
        state = compared(loaded_path, [before], rounded=across)
        if across:
            moved = ranks.run(states.resharded, *training.halves(saved, loaded), loaded_path, size=1)[0]
    except (RankFailure, RankHang, ValueError) as error:
        # The failure is already proven; this run only explains it.
        call = f"train(rank, directory, {step}, {step})"
        remarks.append(f"what loading restores could not be seen: {call}: {first_line(error)}")
    attempts = Attempts()
    if state is not None and state.wrong:
        with contextlib.suppress(RankFailure, RankHang, ValueError):
            fresh = compared(loaded_path, [training.fresh(loaded)])
            for other in (step - 1, step + 1) if step > 1 else ():
                of_steps[other] = compared(loaded_path, [training.until(loaded, other)])
    epochs = ranks.run(states.epochs_of, [training.whole(loaded)[0], before, resumed], size=loaded[0])
    explanation = explained(ends, state, attempts, epochs, moved, fresh, of_steps)
    remarks += attempts.remarks
    return explanation


def _agreement(training: _TrainingRuns, saved: Place, loaded: Place, entry: StateEntry, tolerance: float | None) -> str:
    """Check that uninterrupted runs on the ranks that save and that load agree, and return a line that says so.

    Raises:
        ValueError: they differ, so the checkpoint is not at fault.
        NotCompared: none of their state is comparable.
    """
    locations = f"at {where_is(*saved)} and at {where_is(*loaded)}"
    halves = training.halves(saved, loaded)
    differing, agreeing = training.ranks.run(states.same_training, *halves, tolerance, size=1)[0]
    if differing:
        raise ValueError(
            f"{_GATE}: train depends on the number of ranks: after steps 0 to {training.steps}, without any "
            f"checkpoint, {differing} {locations} differ by more than rounding; so a run that is resumed on other "
            "ranks cannot be judged. Make the step the same at any world size (assert_step_scales says where it "
            "differs), without random numbers that differ between ranks"
        )
    if not agreeing:
        raise NotCompared(
            f"{_GATE}: a run saved at {where_is(*saved)} and resumed at {where_is(*loaded)} ends with another "
            f"{entry} than an uninterrupted run, and no entry of the state could be compared between these "
            "numbers of ranks; so either the checkpoint or train itself differs. Return whole parameters from "
            "train, too, such as full_tensor() or a full state dict"
        )
    return f"uninterrupted runs {locations} agree, so train is the same there"


def _case(saved: Place, loaded: Place, steps: int, last: int | None = None) -> dict[str, object]:
    worlds: dict[str, object] = {"saved at": where_is(*saved), "resumed at": where_is(*loaded)}
    after = f"{last - steps} + {2 * steps - last}" if last not in (None, steps) else steps
    return {**(worlds if saved != loaded else {"world size": loaded[0]}), "steps": f"{steps} + {after}"}
