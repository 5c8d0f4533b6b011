"""The gate for bits: what is declared to leave the bits of a function's results unchanged does so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mgpu_check.diagnosis.report import Report
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.gate_arguments import (
    RanksFixture,
    definition_of,
    name_of,
    naming_unusable,
    noting,
    world_sizes_of,
)
from mgpu_check.gates.run.bits import WAYS, Declaration, examine

_GATE = "assert_bitwise"


def assert_bitwise(
    ranks: RanksFixture,
    run: Callable[[Any, Rank], Any],
    *,
    batch: Callable[[], Any],
    unchanged: Iterable[str] = ("repeated",),
    others: Mapping[str, Callable[[Any, Rank], Any]] | None = None,
    world_sizes: Iterable[int] | None = None,
) -> None:
    """Assert that the bits of what a function returns do not depend on what you declare.

    Each rank calls ``run(batch, rank)``, which builds its model, computes and returns results. All generators are
    seeded alike before each call. `unchanged` says what must not change a bit:

    - ``"repeated"``: a second call with the same batch.
    - ``"batch_size"``: samples that come in a smaller batch: the first half, the last and the first ones. Results with
      the samples as their first dimension are compared, row by row.
    - ``"position"``: samples in reversed order.
    - ``"ranks"``: the world size. Each rank that returns results must return those of one device.
    - ``"order"``: the order of additions in operators and collectives, as on another GPU or with another library. Only
      simulated devices can change it; on real ones the run says that it was not compared.

    `others` has further functions that must return the same bits: packed samples, another tensor parallel degree, more
    micro-batches, a step that was interrupted and resumed, one program compiled and one not.

    Simulated devices compute with the arithmetic of a GPU here: sums take an order that depends on the shapes, and
    atomics another order in each call, unless ``torch.use_deterministic_algorithms(True)`` is on. So one run shows what
    a GPU shows rarely. A failure names the first operator that got the same operands and gave other bits.

    Args:
        ranks: the fixture.
        run: computes on a rank; moves the batch to ``rank.device``. It returns tensors, numbers, or nested mappings and
            sequences of them; None on ranks without results.
        batch: makes the batch: tensors on the CPU, nested as you like. For "batch_size" and "position" their first
            dimension are the samples, at least two for each rank.
        unchanged: some of "repeated", "batch_size", "position", "ranks", "order".
        others: name -> a function that is called as `run` is.
        world_sizes: world sizes to check; default 1 and ``ranks.size``.

    Raises:
        ScalingMismatch: bits differ. The message has the first element with both values, and the first operator.
            ``.site`` is the line that calls it.
        ValueError: an argument is wrong, or results cannot be compared.
    """
    functions = {"run": run, "batch": batch, **{f"others[{name!r}]": other for name, other in (others or {}).items()}}
    for name, value in functions.items():
        if not callable(value):
            raise ValueError(f"{_GATE}: {name}={value!r:.80} is not a function; give one, as in run(batch, rank)")
    ways = (unchanged,) if isinstance(unchanged, str) else tuple(unchanged)
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"{_GATE}: unchanged has {unknown[0]!r}; choose some of {', '.join(WAYS)}")
    if not ways and not others:
        raise ValueError(f"{_GATE}: nothing is declared; give unchanged some of {', '.join(WAYS)}, or others")
    if clash := WAYS.keys() & (others or {}).keys():
        raise ValueError(f"{_GATE}: others has {sorted(clash)[0]!r}, which is a name of unchanged; give another name")
    sizes = sorted({1, ranks.size}) if world_sizes is None else world_sizes_of(ranks, world_sizes)
    if "ranks" in ways:
        if max(sizes) == 1:
            raise ValueError(f"{_GATE}: 'ranks' needs a world size above 1; run pytest with --gpus=2 or more")
        sizes = sorted({1, *sizes})
    declaration = Declaration(run, batch, ways, dict(others or {}))
    of_one_device = None
    for size in sizes:
        with naming_unusable(_GATE), noting(f"world size {size}"):
            verdicts = ranks.run(examine, declaration, of_one_device, size=size)
        if not any(verdict.results for verdict in verdicts):
            raise ValueError(f"{_GATE}: run(batch, rank) returned None on all ranks of world size {size}")
        failures = {rank: verdict.failure for rank, verdict in enumerate(verdicts) if verdict.failure is not None}
        if failures:
            failure = next(iter(failures.values()))
            changed = failure.change or WAYS.get(failure.way, f"the function {failure.way!r} of others")
            report = Report(
                f"{name_of(run)} gives other bits: {changed}",
                {"world size": size, **({"ranks": ", ".join(map(str, failures))} if size > 1 else {})},
                known=[failure.result, *failure.facts],
                place=failure.site or definition_of(run),
            )
            raise ScalingMismatch(str(report), ranks=tuple(failures), site=report.site)
        if size == 1:
            of_one_device = verdicts[0].results
        for line in dict.fromkeys(line for verdict in verdicts for line in verdict.not_compared):
            ranks._not_seen(_GATE, line)
