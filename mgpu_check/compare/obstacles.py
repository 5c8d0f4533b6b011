"""Find the obstacles of a comparison that the runs show, to report all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_check.compare.trace import Trace

SEEDS = "set seeds: torch.manual_seed, random.seed, numpy.random.seed, generator= of loaders and splits"
SNAPSHOT = (
    "give each run its own directory with --fresh-directory, and save there; or remove that file, and save nothing"
)
DROPOUT = "set the probability of dropout to 0 for the comparison"
NUMBERS = (
    "for the comparison, draw no random numbers; or seed a generator for each sample with its index, so that ranks "
    "and one device draw the same numbers"
)
FLOAT32 = (
    "for the comparison, compute in float32: --float32, in a test float32=True, turns autocast and GradScaler off; the "
    "mistakes are the same there, and rounding does not mask them"
)
LOSS = (
    "use a loss that depends on the parameters: a softmax over one class, as in cross_entropy with one output, is "
    "constant, and so is a detached loss"
)


@dataclass(frozen=True)
class Obstacle:
    """A reason why runs cannot be compared, and the remedy."""

    why: str
    todo: str


OTHER_START = Obstacle(
    "the ranks agree with each other, but start from other parameters than one device",
    "set the same seed in every process, and build the model before other random numbers are drawn",
)


OTHER_START_OF_PARTS = Obstacle(
    "the ranks hold parts of the model, and start from other parameters than one device",
    "build the whole model from one seed in every process, and keep the part of the rank afterwards; or load one "
    "checkpoint in all runs",
)


def drawing(trace: Trace, until: int | None = None) -> Obstacle | None:
    """Describe the parts of the model that draw random numbers in training, up to a step; None if no part does."""
    events = [event for event in trace.events if until is None or event["after"] <= until]
    dropouts = sorted({name for event in events if event["event"] == "module" for name in event["dropouts"]})
    draws = [event for event in events if event["event"] == "random"]
    if dropouts or (draws and not draws[0]["line"]):
        what = ", ".join(dropouts) or draws[0]["what"]
        return Obstacle(f"{what} drops different elements on ranks than on one device", DROPOUT)
    if not draws:
        return None
    what, line = draws[0]["what"], draws[0]["line"]
    return Obstacle(f"{what} ({line}) draws random numbers, which differ between ranks and one device", NUMBERS)


def narrow(trace: Trace) -> str:
    """Name the first dtype narrower than float32 that the script computes in, as a clause; else ""."""
    for event in trace.of("narrow"):
        return f"{event['module']} returns {event['dtype']}"
    dtypes = {p.dtype: p.name for p in trace.parameters.values() if p.dtype in ("bfloat16", "float16")}
    return next((f"{name} is {dtype}" for dtype, name in dtypes.items()), "")


def standing(one: Trace, ranks: Sequence[Trace], own: Path | None) -> Iterator[Obstacle]:
    """Yield the obstacles that the run on one device shows, and those of the ranks if they have run.

    Report them only if the runs are not comparable for another reason: a script without seeds is comparable if it loads
    a checkpoint, and a script may check for a file without loading it.

    Args:
        own: a directory of the run on one device alone.
    """
    if (random := drawing(one)) is not None:
        yield random
    if low := narrow(one):
        yield Obstacle(f"{low}: rounding may mask the differences", FLOAT32)
    gradients = [gradient for step in one.steps for gradient in step.gradients.values()]
    if gradients and not any(gradient is not None and gradient.norm for gradient in gradients):
        yield Obstacle("the gradients of all parameters are zero on one device", LOSS)
    if not one.of("seed"):
        yield Obstacle("torch.manual_seed was never called on one device", SEEDS)
    if (file := _snapshot(one)) and not (own and Path(file).is_relative_to(own)):
        yield Obstacle(
            f"the script checks for {file}, and saves it later: does each run resume the run before?", SNAPSHOT
        )
    batch = len(one.steps[0].seen) if one.steps else 0
    whole = all(trace.steps and len(trace.steps[0].seen) == batch for trace in ranks)
    in_parts = any(
        parameter.sharded or parameter.held or parameter.unplaced or len(trace.parameters) < len(one.parameters)
        for trace in ranks
        for parameter in trace.parameters.values()
    )
    if batch and len(ranks) > 1 and whole and not in_parts:
        yield Obstacle(f"each rank has a batch as large as that of one device ({batch})", divided(batch))


def divided(batch: int) -> str:
    """Return the remedy if each rank takes a batch as large as that of one device."""
    return (
        "divide the global batch: batch_size=global_batch // world_size; or, if it is an argument of the script, "
        f"let compare divide it: --batch-size={{{batch}/W}}, where W is the number of processes"
    )


def _snapshot(one: Trace) -> str | None:
    """Return a file that the script did not find at first, and saved later; None if there is no such file."""
    return next((event["file"] for event in one.of("save") if event["missed"]), None)
