"""Draw a divided program, and a mistake to plant in it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from programs.divided.layers import Shape

__all__ = ["LIBRARIES", "WAYS", "Draw", "Optimizer", "Plant", "drawn", "planted"]

WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tensor": (("tp",), ("dp", "tp")),
    "sequence": (("tp",), ("dp", "tp")),
    "context": (("cp",), ("dp", "cp"), ("cp", "tp")),
    "experts": (("ep",), ("dp", "ep"), ("ep", "tp")),
    "pipeline": (("pp",), ("dp", "pp"), ("pp", "tp"), ("dp", "pp", "tp")),
    "zero1": (("dp",), ("dp", "tp")),
    "zero2": (("dp",), ("dp", "tp")),
    "ZeroRedundancyOptimizer": (("dp",), ("dp", "tp")),
    "dtensor": (("tp",), ("dp", "tp")),
    "fsdp1": (("dp",),),
    "fsdp2": (("dp",), ("dp", "tp")),
    "hsdp": (("dp", "fs"),),
    "pipelining": (("pp",), ("dp", "pp")),
}
"""By way of division the axes that it divides over."""

LIBRARIES = ("dtensor", "fsdp1", "fsdp2", "hsdp", "pipelining")
CUT_BY_HAND = ("tp", "ep")


@dataclass(frozen=True)
class Optimizer:
    """`decay` counts for weights only, in a parameter group of their own, where there are `groups`."""

    name: str
    rate: float
    momentum: float
    decay: float
    groups: bool
    clip: float | None


@dataclass(frozen=True)
class Plant:
    """A mistake.

    Attributes:
        axes: those that must be larger than 1, one or all together, for the mistake to show.
        axis: that along which it happens.
        choice: 0 to 1, which parameter.
    """

    name: str
    axis: str
    axes: tuple[str, ...]
    choice: float = 0.0
    factor: float = 2.0


@dataclass(frozen=True)
class Draw:
    """A program.

    Attributes:
        as_world: the ranks have no mesh: the only axis is the world.
        style: the model is "cut" in place, or "rebuilt" from its values.
        options: see `_options`.
        reference: plain single-device code is given as the reference.
    """

    number: int
    way: str
    mesh: tuple[tuple[str, int], ...]
    as_world: bool
    shape: Shape
    optimizer: Optimizer
    options: frozenset[str]
    style: str
    reference: bool
    examples: int
    plant: Plant | None = field(default=None)

    def size(self, axis: str) -> int:
        return dict(self.mesh).get(axis, 1)

    @property
    def wide(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.mesh if size > 1)

    @property
    def returns_loss(self) -> bool:
        """Return whether the step returns the loss: a library's loss includes the auxiliary one, which is no mean over
        ranks."""
        return self.way not in LIBRARIES or self.way == "pipelining" or "experts" not in self.shape.blocks

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different tokens: gradients are summed along them."""
        some = [axis for axis, _ in self.mesh if axis in ("dp", "cp", "ep", "fs")]
        return (*some, "tp") if "sequence" in self.options and self.size("tp") > 1 else tuple(some)

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh)
        return f"{self.number} {self.way} ({mesh})"


def drawn(number: int, seed: int, ways: tuple[str, ...] = tuple(WAYS)) -> Draw:
    """A right program; ways take turns."""
    draw = random.Random(f"{seed} {number}")
    way = ways[number % len(ways)]
    axes = draw.choice(WAYS[way])
    if len(axes) == 1:
        sizes: tuple[int, ...] = (draw.choice((2, 4)),)
    elif len(axes) == 2:
        sizes = draw.choice(((2, 2), (2, 2), (2, 4), (4, 2)))
    else:
        sizes = (2, 2, 2)
    mesh = tuple(zip(axes, sizes, strict=True))
    options = _options(draw, way, dict(mesh))
    shape = _shape(draw, way, dict(mesh), options)
    groups = draw.random() < 0.4
    optimizer = Optimizer(
        draw.choice(("SGD", "Adam", "AdamW")),
        draw.choice((0.02, 0.1)),
        draw.choice((0.0, 0.9)),
        draw.choice((0.1, 0.3)) if groups else draw.choice((0.0, 0.1)),
        groups,
        draw.choice((None, 0.05)),
    )
    return Draw(
        number,
        way,
        mesh,
        len(axes) == 1 and draw.random() < 0.5,
        shape,
        optimizer,
        options,
        draw.choice(("cut", "rebuilt")),
        draw.random() < 0.4,
        draw.choice((4, 8, 12)),
    )


def _options(draw: random.Random, way: str, mesh: dict[str, int]) -> frozenset[str]:
    """The features of a program:

    - "sequence": between the parallel regions each rank has a part of the sequence (Megatron);
    - "vocabulary": embedding and head are cut along the vocabulary;
    - "slim": layers and experts of other ranks are thrown away;
    - "attributes": Megatron's, on the parameters that are cut;
    - "returns on last": only the last stage returns the loss;
    - "uneven": batches that ranks cannot divide;
    - "flat": FSDP1 with its flat parameters, not the original ones;
    - "grad op": FSDP shards gradients and optimizer only;
    - "1F1B", "interleaved": schedules of pipelining.
    """
    found = set()
    if way == "sequence" or ("tp" in mesh and way not in (*LIBRARIES, "tensor") and draw.random() < 0.3):
        found.add("sequence")
    chances = {"vocabulary": 0.4, "slim": 0.5, "attributes": 0.3, "returns on last": 0.4, "flat": 0.5, "grad op": 0.3}
    found |= {option for option, chance in chances.items() if draw.random() < chance}
    if way == "pipelining":
        found.add(draw.choice(("GPipe", "1F1B", "interleaved")))
    if way in ("tensor", "zero1", "zero2", "sequence", "context") and draw.random() < 0.3:
        found.add("uneven")
    return frozenset(found)


def _shape(draw: random.Random, way: str, mesh: dict[str, int], options: frozenset[str]) -> Shape:
    kinds = ["mlp", "attention"]
    if way in ("experts", "zero1", "ZeroRedundancyOptimizer", "pipeline", "context", "fsdp2"):
        kinds.append("experts")
    stages = mesh.get("pp", 1) * (2 if "interleaved" in options else 1)
    count = draw.randint(max(1, stages), max(2, stages))
    blocks = [draw.choice(kinds) for _ in range(count)]
    if way == "experts":
        blocks[0] = "experts"
    if way == "context" or ("tp" in mesh and way in ("tensor", "sequence", "dtensor")):
        blocks[-1] = draw.choice(("attention", "mlp")) if way != "context" else "attention"
    tokens = draw.random() < 0.7
    return Shape(
        tuple(blocks),
        width=draw.choice((8, 16)),
        hidden=draw.choice((8, 16)),
        length=8 if mesh.get("cp", 1) * (mesh.get("tp", 1) if "sequence" in options else 1) > 4 else 4,
        tokens=tokens,
        tied=tokens and draw.random() < 0.3 and way != "pipelining",
        positions=draw.random() < 0.7,
        bias=draw.random() < 0.7,
        norm=draw.choice(("layer", "layer", "rms")),
        last_norm=draw.random() < 0.6,
        fused=way not in ("dtensor", "fsdp2") and draw.random() < 0.6,
        zeros=draw.choice(((), (), ("biases",), ("biases", "positions"), ("last",), ("biases", "last"))),
    )


# Mistakes


def planted(program: Draw, seed: int) -> list[Plant]:
    """All mistakes that can be made in a program."""
    draw = random.Random(f"{seed} {program.number} planted")
    by_hand = program.way not in LIBRARIES
    found = _of_gradients(program, draw) + _of_optimizers(program)
    found += _of_layers(program) if by_hand else _of_libraries(program)
    return [
        Plant(name, axis, axes or (axis,), draw.random(), draw.choice((0.5, 2.0, -1.0))) for name, axis, axes in found
    ]


Found = list[tuple[str, str, tuple[str, ...]]]


def cut_axes(program: Draw) -> list[str]:
    """The axes along which some parameter is cut, or layers are divided."""
    found = []
    for axis in program.wide:
        if axis == "tp":
            blocks = {"mlp", "attention"} & set(program.shape.blocks)
            vocabulary = "vocabulary" in program.options and program.shape.tokens and program.way != "dtensor"
            if blocks or vocabulary:
                found.append(axis)
        elif (
            axis == "pp"
            or (axis == "ep" and "experts" in program.shape.blocks)
            or program.way in ("fsdp1", "fsdp2")
            or (axis == "fs")
            or (axis == "dp" and program.way in ("zero1", "zero2"))
        ):
            found.append(axis)
    return found


def _of_gradients(program: Draw, draw: random.Random) -> Found:
    found: Found = [("slice scaled", axis, ()) for axis in cut_axes(program)]
    if program.optimizer.clip is None:  # which takes a common factor out again
        found += [("scaled by the size of an axis", axis, ()) for axis in program.wide]
    if program.optimizer.clip is not None and program.way not in ("fsdp2", "dtensor"):
        axes = [axis for axis in cut_axes(program) if program.way != "fsdp1" or axis == "dp"]
        if program.way == "hsdp":
            axes = []
        found += [("norm of the shards of one rank", axis, ()) for axis in axes]
    if program.way in LIBRARIES:
        if program.way in ("dtensor", "pipelining") and program.size("dp") > 1:
            found.append(("gradients not reduced", "dp", ()))
        return found
    for axis in program.data_axes:
        if program.size(axis) > 1 and not (program.way == "zero2" and axis == "dp"):
            found.append(("gradients not reduced", axis, ()))
            found.append(("one gradient not reduced", axis, ()))
    if program.size("dp") > 1 and program.size("tp") > 1 and program.way not in ("zero2",):
        common = "tp" not in cut_axes(
            program
        )  # a factor of all gradients, or none where they are to be summed along tp
        if not common or (program.optimizer.clip is None and "tp" not in program.data_axes):
            found.append(("reduced over all ranks", "tp", ("tp",)))
        found.append(("reduced over the other axis", "dp", ("dp", "tp")))
    if "tp" in program.data_axes:
        found.append(("norms and biases not reduced", "tp", ()))
    return found


def _of_optimizers(program: Draw) -> Found:
    found: Found = []
    cut = [axis for axis in cut_axes(program) if axis in ("pp", "tp", "ep") or program.way in ("fsdp1", "fsdp2")]
    for axis in cut:
        found.append(("another learning rate", axis, ()))
        found.append(("never steps", axis, ()))
        if program.optimizer.groups:
            found.append(("parameter groups lost", axis, ()))
    if program.size("dp") > 1 and program.way not in ("fsdp1", "fsdp2", "hsdp"):
        found.append(("stale replica", "dp", ()))
    return found


def _of_layers(program: Draw) -> Found:
    shape, found = program.shape, []
    if program.size("tp") > 1:
        cut = {"mlp", "attention"} & set(shape.blocks)
        if cut and shape.bias and "biases" not in shape.zeros:
            found.append(("bias added on every rank", "tp", ()))
        if cut and "last" not in shape.zeros and "sequence" not in program.options:
            found.append(("output not reduced", "tp", ()))
            found.append(("gradient of the input not reduced", "tp", ()))
        if "vocabulary" in program.options and shape.tokens:
            found.append(("tokens of others not masked", "tp", ()))
    for axis in ("cp", "tp"):
        spread = axis == "cp" or "sequence" in program.options
        if program.size(axis) > 1 and spread and shape.positions and "positions" not in shape.zeros:
            found.append(("positions restart", axis, ()))
    if "experts" in shape.blocks:
        if program.size("ep") > 1:
            found.append(("gradients of experts divided", "ep", ()))
        found.append(("auxiliary loss times the world", program.wide[0], program.wide))
    if program.size("pp") > 1 and shape.tied:
        found.append(("tied weights not summed", "pp", ()))
    return found


def _of_libraries(program: Draw) -> Found:
    if program.way == "hsdp":
        return [("replicas take the same samples", "dp", ())]
    shows = program.optimizer.clip is None or program.returns_loss  # clipping takes the factor out again
    if program.way in ("fsdp1", "fsdp2") and shows:
        return [("sum in place of a mean", "dp", ())]
    return []


def worlds(program: Draw) -> int:
    return math.prod(size for _, size in program.mesh)
