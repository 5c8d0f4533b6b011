"""Models that are divided among ranks: how slices, stages and experts are placed, and put together."""

from __future__ import annotations

import dataclasses
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_check.compare.alignment import Aligned, deviation
from mgpu_check.compare.assembly import assembled, matched
from mgpu_check.compare.in_script.models import Names
from mgpu_check.compare.in_script.placements import Placing, read_placements, read_wholes, write_tensor
from mgpu_check.compare.in_script.summaries import Cut, summaries
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import Parameter, Step, TensorSummary, Trace, joined
from mgpu_check.compare.verdict import verdict_of
from mgpu_check.numerics.placement import Slice, Wholes, beside, indexed, zero_parts

WEIGHT = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
GRADIENT = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))


def summary(tensor, cut=None) -> TensorSummary:
    (numbers,) = summaries([tensor], [cut])
    assert numbers is not None
    return TensorSummary.of(numbers)


def trace(rank, world, tensors, idle=(), options=None):
    """A trace of one step; `tensors` are name -> value, gradient, value after it; or a slice of them."""
    made = Trace(rank, world)
    step = Step(0, [1.0], [list(range(rank, 4, world))], [[]], {}, {}, {}, frozenset(idle), options or {})
    for order, (name, (cut, *values)) in enumerate(tensors.items()):
        shape = tuple(values[0].shape) if cut is None else tuple(cut.shape)
        held = None if cut is None else cut.held
        made.parameters[name] = Parameter(name, shape, "float32", "cpu", order, held=held)
        before, gradient, after = (None if value is None else summary(value, cut) for value in values)
        step.before[name], step.gradients[name], step.parameters[name] = before, gradient, after
    made.steps.append(step)
    return made


def trained(value, gradient):
    return None, value, gradient, value - 0.1 * gradient


def part(rows, scale=1.0):
    """Some rows of the weight, as the rank that holds them has them."""
    at = torch.tensor(list(rows))
    cut = Cut(Slice("net.weight", (8, 5), indexed((8, 5), at)))
    return cut, WEIGHT[at], scale * GRADIENT[at], WEIGHT[at] - 0.1 * scale * GRADIENT[at]


def ranks_of(*tensors, **options):
    """A rank for each of these tensors."""
    return [trace(rank, len(tensors), own, **options) for rank, own in enumerate(tensors)]


def verdict(one, ranks):
    found = assembled(one, ranks)
    aligned = Aligned(one, found.ranks, **found.placed())
    return verdict_of(aligned, Rounding(one, [one]), None)


RIGHT = {"net.weight": trained(WEIGHT, GRADIENT)}
ONE = trace(0, 1, RIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(7,), (8, 5), (3, 4, 5)])
def test_summaries_of_slices_add_up(shape, dtype):
    whole = torch.randn(shape, dtype=dtype)
    order = torch.randperm(whole.numel())
    cuts = [Cut(Slice("w", shape, at), whole.is_complex()) for at in order.tensor_split(3)]
    parts = [summary(whole.reshape(-1)[cut.part.at], cut) for cut in cuts]
    together, expected = joined(parts), summary(whole)
    assert together.bits == expected.bits and together.samples == expected.samples
    assert deviation(together, expected, cuts[0].shape).size < 1e-10
    assert sum(cut.held.count for cut in cuts) == torch.Size(cuts[0].shape).numel()
    assert (sum(cut.held.mark for cut in cuts) - cuts[0].held.all) % 2**64 == 0


def test_slices_are_judged_as_a_whole():
    found = verdict(ONE, ranks_of({"shard": part(range(4))}, {"shard": part(range(4, 8))}))
    assert (found.kind, found.not_compared) == ("equal", {})
    found = verdict(ONE, ranks_of({"shard": part(range(4))}, {"shard": part(range(4, 8), 3.0)}))
    assert (found.kind, found.parameter, found.tensor, found.ranks) == ("differs", "net.weight", "gradient", (1,))


def test_ranks_that_hold_the_same_slice_must_agree():
    found = verdict(ONE, ranks_of(*({"shard": part(range(r % 2, 8, 2), 1.0 + (r == 3))} for r in range(4))))
    assert (found.kind, found.ranks) == ("differs", (3,))
    assert "the ranks disagree" in found.report.headline or len(found.ranks) == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((range(4), range(4, 7)), "by 35 of 40 elements: dim 0: 0 to 3 of 8; dim 0: 4 to 6 of 8"),
        ((range(5), range(4, 8)), "more than once"),
    ],
)
def test_slices_that_do_not_cover_a_parameter_once(rows, words):
    bias = trained(torch.ones(8), torch.ones(8))
    one = trace(0, 1, {**RIGHT, "net.bias": bias})
    found = verdict(one, ranks_of(*({"shard": part(some), "net.bias": bias} for some in rows)))
    assert found.kind == "undecided" and words in found.not_compared["net.weight"]
    alone = verdict(ONE, ranks_of(*({"shard": part(some)} for some in rows)))
    assert alone.kind == "not comparable" and words in str(alone.report)


def stage(rank, world, layers, number):
    """One or several of four layers, counted anew from 0, with a norm of ones in each."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for layer in range(4):
        weight, gradient, slope = (torch.randn(4, 4, generator=generator) for _ in range(3))
        if layer in layers:
            name = number(layer)
            made[f"{name}.weight"] = trained(weight, gradient)
            made[f"{name}.norm.weight"] = trained(torch.ones(4), slope[0])
    return trace(rank, world, made)


def test_stages_are_placed_by_values_and_constants_by_their_neighbours():
    one = stage(0, 1, range(4), str)
    ranks = [stage(rank, 2, (2 * rank, 2 * rank + 1), lambda n: str(n % 2)) for rank in range(2)]
    assert matched(one, ranks[1])["0.norm.weight"] == "2.norm.weight"
    found = verdict(one, ranks)
    assert (found.kind, found.not_compared) == ("equal", {})
    assert "the same 8 parameters" in found.report.headline


def layers(rank, world, numbers, scale=1.0):
    """Layers that begin alike and have names from 0 on; and a head that has its name everywhere."""
    made = {f"{n}.weight": trained(WEIGHT, scale * GRADIENT.roll(number, 0)) for n, number in enumerate(numbers)}
    return trace(rank, world, made | ({"head": trained(GRADIENT, WEIGHT)} if rank or world == 1 else {}))


def test_layers_that_are_copies_are_placed_by_their_gradients():
    one, ranks = layers(0, 1, range(4)), [layers(rank, 2, (2 * rank, 2 * rank + 1)) for rank in range(2)]
    assert matched(one, ranks[1]) == {"0.weight": "2.weight", "1.weight": "3.weight", "head": "head"}
    found = verdict(one, ranks)
    assert (found.kind, found.not_compared) == ("equal", {})
    wrong = layers(1, 2, (2, 3), 2.0)
    assert verdict(one, [ranks[0], wrong]).kind in ("differs", "undecided")


def test_zeros_of_either_sign_are_equal():
    """A parameter that starts as 0 * torch.rand(n) has the same name on ranks with other seeds."""
    signs = torch.tensor([[-1.0, 1, 1, 1], [-1, -1, 1, 1]])
    one, rank = (
        trace(0, 1, {name: trained(0 * value, torch.ones(4)) for name, value in zip("ab", some, strict=True)})
        for some in (signs, signs.flip(0))
    )
    assert matched(one, rank) == {"a": "a", "b": "b"}


def test_copies_without_names_and_gradients_are_not_placed():
    one, copy = trace(0, 1, {f"{n}.weight": trained(WEIGHT, GRADIENT) for n in range(2)}), trained(WEIGHT, GRADIENT)
    found = verdict(one, ranks_of({"0.weight": copy}, {"own": copy}))
    assert found.kind == "undecided" and set(found.not_compared) == {"1.weight", "own (rank 1)"}


def test_slices_of_other_tensors_under_one_name_are_not_put_together():
    def shard(rank):
        """Half of a layer that FSDP1 flattens, under the name that it has in its stage."""
        cut, value, gradient, after = part(range(4) if rank % 2 == 0 else range(4, 8))
        return cut, value + rank // 2, gradient, after

    found = assembled(ONE, ranks_of(*({"net.weight": shard(rank)} for rank in range(4))))
    assert found.reasons == {"net.weight": "ranks that hold the same slice of it start with different values"}


def test_a_rank_that_begins_elsewhere_is_compared_by_name():
    found = verdict(ONE, ranks_of(RIGHT, {"net.weight": trained(WEIGHT + 1, GRADIENT)}))
    assert (found.kind, found.tensor, found.report.mistakes) == ("differs", "before", ("different-initialization",))


def test_names_of_ranks_that_begin_elsewhere_may_have_the_prefix_of_a_wrapper():
    """Without it only constants would be compared, such as the scale of a norm, and their gradients would differ."""
    ones = torch.ones(8)
    one = trace(0, 1, {**RIGHT, "net.scale": trained(ones, ones)})
    own = {"net.weight": trained(WEIGHT + 1, -GRADIENT), "net.scale": trained(ones, -ones)}
    own = {f"_forward_module.{name}": values for name, values in own.items()}
    found = verdict(one, ranks_of(own, own))
    assert found.kind == "not comparable" and "start from other parameters than one device" in found.report.headline


def drawn(*seeds: int, names: Any = None) -> dict[str, Any]:
    """Layers of one shape and one bias, each drawn from a seed, and numbered from 0 unless they have names."""
    made: dict[str, Any] = {}
    for number, seed in enumerate(seeds):
        value, bias = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) for size in ((4, 4), (4,)))
        name = names[number] if names else f"layers.{number}"
        made |= {f"{name}.weight": trained(value, value), f"{name}.bias": trained(bias, bias)}
    return made


@pytest.mark.parametrize(
    "stages",
    [
        [drawn(1), drawn(9)],  # the first stage starts as one device
        [drawn(8), drawn(9)],
        [drawn(1), drawn(1), drawn(9), drawn(9)],  # with a replica of each stage
        [drawn(9), drawn(2)],
        [drawn(8, names=["head"]), drawn(9, names=["tail"])],
    ],
)
def test_stages_that_draw_their_own_layers_start_elsewhere(stages):
    found = verdict(trace(0, 1, drawn(1, 2)), ranks_of(*stages))
    assert (found.kind, found.report.mistakes) == ("not comparable", ())
    assert "the ranks hold parts of the model, and start from other parameters" in found.report.headline
    assert found.report.remarks[0].startswith("do: build the whole model from one seed in every process")


@pytest.mark.parametrize(
    ("one", "ranks"),
    [
        (drawn(1, 2), [drawn(1, 2), drawn(8, 9)]),
        (drawn(1, 2), [drawn(7, 2), drawn(8, 9)]),
        (drawn(1), [drawn(1), drawn(9)]),
        (drawn(1, 2, 3), [drawn(6, 7), drawn(8, 9)]),  # one device also trains a layer that the ranks lack
    ],
)
def test_replicas_that_start_from_other_values_differ(one, ranks):
    found = verdict(trace(0, 1, one), ranks_of(*ranks))
    assert (found.kind, found.report.mistakes[0]) == ("differs", "different-initialization")


def test_a_parameter_that_a_rank_never_uses_is_judged_by_the_others():
    unused = trace(1, 2, {"net.weight": (None, WEIGHT, None, WEIGHT)}, idle=["net.weight"])
    right = trace(0, 2, RIGHT)
    assert verdict(ONE, [right, unused]).kind == "equal"
    used = dataclasses.replace(unused, steps=[dataclasses.replace(unused.steps[0], idle=frozenset())])
    assert verdict(ONE, [right, used]).kind == "differs"


def test_a_file_of_wholes_finds_slices():
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    nn.init.zeros_(net[0].bias)
    with tempfile.TemporaryFile() as file:
        for name, value in net.named_parameters():
            write_tensor(file.fileno(), "parameter", name, value)
        wholes = read_wholes(file.fileno()).parameters
    assert torch.equal(wholes.whole("1.weight"), net[1].weight)
    names, local = Names(), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    local.load_state_dict({"0.weight": net[0].weight[3:], "0.bias": net[0].bias[3:]}
                          | {"1.weight": net[1].weight[:, 3:], "1.bias": net[1].bias})  # fmt: skip
    names.called(local)
    parts = [some for (some,) in Placing(names, wholes).parts([(p, "") for p in local.parameters()])]
    assert [part.label for part in parts] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    told = [part.cut and (part.cut.held.whole, part.cut.held.told) for part in parts]
    assert told == [
        ("0.weight", "dim 0: 3 to 5 of 6"),
        ("0.bias", "dim 0: 3 to 5 of 6"),
        ("1.weight", "dim 1: 3 to 5 of 6"),
        None,
    ]


def test_neighbours_place_constants_only_where_they_have_the_values():
    wholes = Wholes({"a.weight": WEIGHT, "a.bias": torch.arange(8.0)})
    rows = Slice("a.weight", (8, 5), indexed((8, 5), slice(2, 4)))
    near = [(torch.Size((2, 5)), rows)]
    assert beside("x.bias", torch.tensor([2.0, 3.0]), near, wholes).at.tolist() == [2, 3]
    assert beside("x.bias", torch.zeros(2), near, wholes) is None
    columns = Slice("a.weight", (8, 5), indexed((8, 5), (slice(None), slice(0, 2))))
    assert beside("x.bias", torch.arange(8.0), [(torch.Size((8, 2)), columns)], wholes) is None


def with_options(rank, world, **options):
    tensors = {"net.weight": (None, WEIGHT, GRADIENT, WEIGHT - options.get("lr", 0.1) * GRADIENT)}
    return trace(rank, world, tensors, options={"net.weight": {"optimizer": "SGD", "lr": 0.1, **options}})


def test_the_optimizer_is_named_where_gradients_are_right():
    one = with_options(0, 1)
    found = verdict(one, [with_options(rank, 2, lr=0.3) for rank in range(2)])
    assert (found.kind, found.tensor, found.report.mistakes) == ("differs", "parameter", ("optimizer-differs",))
    assert "the learning rate of net.weight is 0.3 on ranks 0-1, and 0.1 on one device" in str(found.report)
    found = verdict(one, [with_options(rank, 2, weight_decay=0.5) for rank in range(2)])
    assert found.kind == "equal"
    decay = "the weight decay of net.weight is 0.5 on ranks 0-1, and none on one device"
    assert any(decay in remark for remark in found.report.remarks)
    lost = {"net.weight": (None, WEIGHT, GRADIENT, WEIGHT - 0.3 * GRADIENT.roll(1))}
    found = verdict(one, ranks_of(lost, lost))
    assert found.report.mistakes == ("optimizer-differs",) and "check its update rule" in str(found.report)


def placed(local: nn.Module, wholes: Wholes, coordinates=None, **options):
    """The parts of its parameters, by their names."""
    names = Names()
    names.called(local)
    placing = Placing(names, wholes, **options)
    placing.coordinates = coordinates or {}
    parts = [some[0] for some in placing.parts([(p, "") for p in local.parameters()])]
    return sorted(parts, key=lambda part: part.label)


def cut_of(part):
    return part.cut and part.cut.held.told


class Scales(nn.Module):
    """A scale of ones that no tensor of its module places, and a weight elsewhere."""

    def __init__(self, weight, scale):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(weight.clone())
        self.scale = nn.Parameter(scale.clone())


def test_constants_are_placed_along_the_axis_of_others():
    wholes = Wholes({"inner.weight": WEIGHT, "scale": torch.ones(6)})
    local = Scales(WEIGHT[4:], torch.ones(3))
    weight, scale = placed(local, wholes, {"dp": (0, 2), "tp": (1, 2)})
    assert (cut_of(weight), cut_of(scale)) == ("dim 0: 4 to 7 of 8", "dim 0: 3 to 5 of 6")
    assert scale.same_elsewhere and not weight.same_elsewhere  # other values may tell otherwise
    for coordinates in ({"dp": (0, 2)}, {}, {"tp": (1, 4)}):
        _, scale = placed(local, wholes, coordinates)
        assert scale.cut is None and scale.unplaced and scale.same_elsewhere
    _, interleaved = placed(Scales(WEIGHT[1::2], torch.ones(3)), wholes, {"tp": (1, 2)})
    assert interleaved.cut is None


def test_constants_are_placed_as_another_run_has_found_them():
    moved = {"inner.weight": WEIGHT, "scale": torch.arange(6.0)}
    with tempfile.TemporaryFile() as found:
        placed(Scales(WEIGHT[1::2], torch.tensor([1.0, 3.0, 5.0])), Wholes(moved), note=found.fileno())
        known = read_placements(found.fileno())
    assert known["scale"][0].at.tolist() == [1, 3, 5]
    still = Wholes({**moved, "scale": torch.ones(6)})
    _, scale = placed(Scales(WEIGHT[1::2], torch.ones(3)), still, placements=known)
    assert cut_of(scale) == "dim 0: 1 and 3 and 5 of 6" and not scale.unplaced


def test_attributes_of_megatron_count_where_the_values_agree():
    wholes = Wholes({"inner.weight": torch.zeros(8, 5), "scale": WEIGHT[0]})
    local = Scales(torch.zeros(4, 5), WEIGHT[0])
    parameter: Any = local.inner.weight
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 2
    weight, _ = placed(local, wholes, {"tp": (1, 2)})
    assert cut_of(weight) == "dim 0: 2 to 3 and 6 to 7 of 8"
    with torch.no_grad():
        parameter += 1
    weight, _ = placed(local, wholes, {"tp": (1, 2)})
    assert weight.unplaced


def mapping(flat, whole, part):
    """What the stages 1 and 2 of ZeRO keep in a parameter: a start in the whole, and a range of the partition."""
    start, numel = part[0], part[1] - part[0]
    return SimpleNamespace(
        hp_fragment=flat.detach()[slice(*part)],
        lp_fragment_address=SimpleNamespace(start=whole, numel=numel),
        hp_fragment_address=SimpleNamespace(start=start, numel=numel),
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_partition_of_zero_has_the_names_of_the_users_parameters(stage, monkeypatch):
    model, flat = nn.Linear(3, 2), nn.Parameter(torch.zeros(6))  # on the second of two ranks; the end is padding
    weight: Any = model.weight
    bias: Any = model.bias
    expected = {"weight": ([5], (0, 1)), "bias": ([0, 1], (1, 3))}
    if stage == 2:
        weight._hp_mapping, bias._hp_mapping = mapping(flat, 5, (0, 1)), mapping(flat, 0, (1, 3))
    else:
        monkeypatch.setattr("torch.distributed.get_rank", lambda group: 1)
        groups, expected = {0: [0, 0, 4], 1: [0, 4, 1]}, {"weight": ([4, 5], (0, 2)), "bias": ([1], (4, 5))}
        owner = SimpleNamespace(
            grad_position=groups, get_param_id=lambda p: p.ds_id, fp32_partitioned_groups_flat=[flat]
        )
        for number, (own, size) in enumerate([(weight, 4), (bias, 1)]):
            own.ds_id, own._z3_optimizer, own.ds_process_group = number, owner, None
            own.ds_tensor, own.ds_numel, own.ds_shape = SimpleNamespace(ds_numel=size), own.numel(), own.shape
            own.data = torch.empty(0)  # gathered only where it is used
    names = Names()
    names.called(model)
    (parts,) = Placing(names, None).parts([(flat, "optimizer0.group0.parameter0")])
    assert {part.label: (part.cut.part.at.tolist(), part.cut.part.within) for part in parts} == expected
    assert [part.cut.part.shape for part in parts] == [(2, 3), (2,)]
    assert zero_parts(nn.Parameter(torch.zeros(6)), [model]) is None
