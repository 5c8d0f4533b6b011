"""Collect what stands in the way of a comparison, as far as the runs show it: reported at once, not one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mgpu_check.compare.trace import Trace

__all__ = [
    "DROPOUT",
    "FLOAT32",
    "LOSS",
    "NUMBERS",
    "OTHER_START",
    "SEEDS",
    "SNAPSHOT",
    "Obstacle",
    "divided",
    "drawing",
    "narrow",
    "standing",
]

SEEDS = "set seeds: torch.manual_seed, random.seed, numpy.random.seed, generator= of loaders and splits"
SNAPSHOT = "give each run a directory of its own with --fresh-directory; or have the script save elsewhere, and remove that file"
DROPOUT = "set the probability of dropout to 0 for the comparison"
NUMBERS = (
    "for the comparison, draw none; or draw for each sample from a generator with a seed of that sample, so that ranks and "
    "one device draw the same"
)
FLOAT32 = (
    "compute in float32 for the comparison, without autocast: the mistakes that it looks for are the same there, and "
    "nothing else hides them"
)
LOSS = (
    "have a loss that depends on the parameters: a softmax over one class, as of cross_entropy with one output, is constant; "
    "so is what was detached"
)


@dataclass(frozen=True)
class Obstacle:
    """A reason for which no run can be compared, and what to do about it."""

    why: str
    todo: str


OTHER_START = Obstacle(
    "the ranks agree with each other, but start from other parameters than one device",
    "seed every process alike before the model is built, and build it before random numbers are drawn",
)


def drawing(trace: Trace, until: int | None = None) -> Obstacle | None:
    """Return the parts of the model that draw random numbers in training; until a step. None if no part does."""
    events = [event for event in trace.events if until is None or event["after"] <= until]
    dropouts = sorted({name for event in events if event["event"] == "module" for name in event["dropouts"]})
    draws = [event for event in events if event["event"] == "random"]
    if dropouts or (draws and not draws[0]["line"]):
        what = ", ".join(dropouts) or draws[0]["what"]
        return Obstacle(f"{what} drops other elements on ranks than on one device", DROPOUT)
    if not draws:
        return None
    what, line = draws[0]["what"], draws[0]["line"]
    return Obstacle(f"{what} ({line}) draws random numbers, and others on ranks than on one device", NUMBERS)


def narrow(trace: Trace) -> str:
    """Name the dtype narrower than float32 in which the script computes, as a clause; empty where it does not."""
    for event in trace.of("narrow"):
        return f"{event['module']} gives {event['dtype']}"
    dtypes = {p.dtype: p.name for p in trace.parameters.values() if p.dtype in ("bfloat16", "float16")}
    return next((f"{name} is {dtype}" for dtype, name in dtypes.items()), "")


def standing(one: Trace, ranks: Sequence[Trace], fresh: bool) -> Iterator[Obstacle]:
    """Yield all that is known from the run on one device, and from the ranks where they have run.

    A script without seeds may be comparable, where it begins with a checkpoint; and so may one that does not load the
    file that it looks for. To be said only of one that is not comparable for another reason.

    Args:
        fresh: each run has a directory of its own.
    """
    if (random := drawing(one)) is not None:
        yield random
    if low := narrow(one):
        yield Obstacle(f"{low}: rounding may hide what is looked for", FLOAT32)
    gradients = [gradient for step in one.steps for gradient in step.gradients.values()]
    if gradients and not any(gradient is not None and gradient.norm for gradient in gradients):
        yield Obstacle("the gradients of all parameters are zero on one device", LOSS)
    if not one.of("seed"):
        yield Obstacle("torch.manual_seed was never called on one device", SEEDS)
    if (file := _snapshot(one)) and not fresh:
        yield Obstacle(
            f"the script looks for {file}, and saves it later: does each run go on from the one before?", SNAPSHOT
        )
    batch = len(one.steps[0].seen) if one.steps else 0
    whole = all(trace.steps and len(trace.steps[0].seen) == batch for trace in ranks)
    in_parts = any(
        parameter.sharded or parameter.held or parameter.unplaced
        for trace in ranks
        for parameter in trace.parameters.values()
    )
    if batch and len(ranks) > 1 and whole and not in_parts:
        yield Obstacle(f"each rank takes a batch as large as one device does ({batch})", divided(batch))


def divided(batch: int) -> str:
    """Advise what to do where each rank takes a batch of one device."""
    return (
        "divide the global batch: batch_size=global_batch // world_size; or, where it is an argument of the script, "
        f"let compare divide it: --batch-size={{{batch}/W}}, where W is the number of processes"
    )


def _snapshot(one: Trace) -> str | None:
    """Return a file that the script has looked for in vain, and saved later."""
    return next((event["file"] for event in one.of("save") if event["missed"]), None)
