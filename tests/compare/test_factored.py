"""States of optimizers that have another shape than their parameter: how they are divided, put together, and judged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.in_script.models import Names
from mgpu_check.compare.in_script.parameters import Parameters, States, entries, flat_parts, statistic
from mgpu_check.compare.in_script.placements import Placing, read_wholes, write_shape, write_tensor
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import FORMAT, VERSION, TensorSummary, Trace, Writer, read
from mgpu_check.compare.verdict import ComparisonVerdict, verdict_of
from mgpu_check.numerics.placement import Slice, indexed
from tests.compare.conftest import script
from tests.compare.test_assembly import GRADIENT, ONE, RIGHT, WEIGHT, part, ranks_of, summary, trace, verdict
from tests.compare.test_states import keeping

WHOLE = (8, 5)
SQUARES = GRADIENT.square()


def test_values_in_lists_and_dicts_have_names():
    state = {"step": 1, "dirs": [2, (3, None)], "left": {"q": 4}}
    assert dict(entries(state)) == {"step": 1, "dirs[0]": 2, "dirs[1][0]": 3, "dirs[1][1]": None, "left[q]": 4}


def test_a_flat_state_has_a_part_of_each_parameter():
    parameters = [torch.zeros(2, 3), torch.zeros(4)]
    weight, bias = flat_parts(torch.arange(10.0), parameters)
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]] and bias.tolist() == [6, 7, 8, 9]
    assert flat_parts(torch.zeros(9), parameters) is None
    assert flat_parts(torch.zeros(10, 1), parameters) is None


@pytest.mark.parametrize(
    ("index", "local", "own", "shape", "told"),
    [
        (slice(0, 4), (4, 5), (4, 1), (8, 1), ("dim 0: 0 to 3 of 8", "")),
        (slice(0, 4), (4, 5), (1, 5), (1, 5), ("all", "dim 0: 0 to 3 of 8")),
        (slice(0, 4), (4, 5), (4,), (8,), ("dim 0: 0 to 3 of 8", "")),
        (slice(7, 8), (1, 5), (1, 5), (1, 5), ("all", "dim 0: 7 of 8")),
        (slice(7, 8), (1, 5), (1, 1), (8, 1), ("dim 0: 7 of 8", "")),
        ((slice(None), slice(1, 3)), (8, 2), (2,), (5,), ("dim 0: 1 to 2 of 5", "")),
        ((slice(0, 8, 2), slice(1, 3)), (4, 2), (4, 1), (8, 1), ("dim 0: 0 and 2 and 4 and 1 more ranges of 8", "dim 1: 1 to 2 of 5")),
        (slice(0, 4), (20,), (4,), (8,), None),  # a slice that is reshaped
        (slice(0, 4), (4, 5), (3,), (8,), None),
    ],
)  # fmt: skip
def test_a_statistic_is_placed_in_the_dimensions_that_it_keeps(index, local, own, shape, told):
    found = statistic(torch.zeros(own), torch.Size(local), Slice("w", WHOLE, indexed(WHOLE, index)), shape)
    assert (found and (found.held.told, found.held.covers)) == told


def test_a_statistic_of_a_square_of_a_square_has_no_place():
    square = Slice("w", (8, 8), indexed((8, 8), (slice(0, 4), slice(4, 8))))
    assert statistic(torch.zeros(4), torch.Size((4, 4)), square, (8,)) is None


def rank_with(
    rank: int,
    rows: range,
    of_columns: Callable[[torch.Tensor], torch.Tensor],
    rule: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> Trace:
    """A rank with rows of the weight, their own means, and a statistic of the columns."""
    cut, value, gradient, _ = part(rows)
    made = trace(rank, 2, {"shard": (cut, value, gradient, value - 0.1 * rule(gradient))})
    squares = SQUARES[list(rows)]
    place = (gradient.shape, cut.part)
    of_rows = squares.mean(1)
    columns = of_columns(squares)
    rows_at, columns_at = statistic(of_rows, *place, (8,)), statistic(columns, *place, (5,))
    assert rows_at is not None and columns_at is not None
    return keeping(made, of_rows=(of_rows, rows_at), of_columns=(columns, columns_at))


def judged(
    of_columns: Callable[[torch.Tensor], torch.Tensor], rule: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> ComparisonVerdict:
    one = keeping(ONE, of_rows=(SQUARES.mean(1), None), of_columns=(SQUARES.mean(0), None))
    return verdict(one, [rank_with(r, rows, of_columns, rule) for r, rows in enumerate((range(3), range(3, 8)))])


NO_MEAN = (
    "each rank may keep a statistic of its own slice (dim 0: 0 to 2 of 8; dim 0: 3 to 7 of 8), and their mean is not "
    "that of one device"
)


@pytest.mark.parametrize(
    ("of_columns", "kind"),
    [
        pytest.param(lambda own: SQUARES.mean(0), "equal", id="reduced over the ranks"),
        pytest.param(lambda own: own.mean(0), "equal", id="of each slice"),
        pytest.param(lambda own: own.sum(0), "undecided", id="sums"),
        pytest.param(lambda own: own.amax(0), "undecided", id="maxima"),
        pytest.param(lambda own: 1.001 * SQUARES.mean(0), "differs", id="wrong"),
        pytest.param(lambda own: own.mean(0) * (1 + 0.002 * (len(own) > 3)), "differs", id="wrong of a slice"),
    ],
)
def test_statistics_of_slices_are_judged_as_a_whole(of_columns, kind):
    found = judged(of_columns)
    assert found.kind == kind
    assert found.not_compared == ({"of_columns of net.weight": NO_MEAN} if kind == "undecided" else {})
    if kind == "differs":
        assert (found.parameter, found.tensor) == ("of_columns of net.weight", "state")


def test_an_optimizer_that_is_another_one_on_slices():
    found = judged(lambda own: own.mean(0), rule=torch.sign)
    assert (found.kind, found.parameter, found.tensor) == ("differs", "net.weight", "parameter")
    told = (
        "each rank computes of_columns of net.weight from its own slice (dim 0: 0 to 2 of 8 on rank 0; dim 0: 3 to 7 "
        "of 8 on rank 1), and one device from the whole"
    )
    assert told in str(found.report)
    assert told not in str(judged(lambda own: SQUARES.mean(0), rule=torch.sign).report)


def recorded(net: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, torch.Tensor], shapes) -> Trace:
    """Return the states that are recorded for a rank, where one device has the parameters and shapes of states that are
    given."""
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as wholes:
        for name, value in kept.items():
            write_tensor(wholes.fileno(), "parameter", name, value)
        for name, shape in shapes.items():
            write_shape(wholes.fileno(), name, shape)
        writer, names = Writer(file.fileno()), Names()
        writer.write("start", format=FORMAT, version=VERSION, rank=0, world=2)
        names.called(net)
        known = Parameters(writer, names)
        read_ = read_wholes(wholes.fileno())
        known.placing = Placing(names, read_.parameters, read_.buffers)
        states = States(writer, names, known, lambda: None)
        states.shapes = read_.states
        parts = known.parts(optimizer, 0)
        optimizer.step(lambda: net(torch.ones(2, 5)).sum())
        with torch.no_grad():
            found = states.after([optimizer], parts, set())
        file.seek(0)
        made = read(file.read())
        names_ = list(made.states)
        made.steps = [trace(0, 2, {}).steps[0]]
        made.steps[0].states = {names_[number]: TensorSummary.of(numbers) for number, numbers in found.items()}
        return made


def sliced() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A module with the first rows of a weight, and what one device has."""
    net = nn.Linear(5, 3)
    kept = {"weight": WEIGHT, "bias": torch.arange(3.0)}
    with torch.no_grad():
        net.weight.copy_(WEIGHT[:3])
        net.bias.copy_(kept["bias"])
    net.weight.grad, net.bias.grad = GRADIENT[:3].clone(), torch.ones(3)
    return net, kept


def test_flat_states_are_recorded_as_parts_of_each_parameter():
    net, kept = sliced()
    made = recorded(net, torch.optim.LBFGS(net.parameters(), max_iter=1), kept, {})
    for key in ("prev_flat_grad", "d"):
        assert made.states[f"{key} of weight"].held.told == "dim 0: 0 to 2 of 8"
        assert made.states[f"{key} of bias"].held is None and made.states[f"{key} of bias"].shape == (3,)
    assert made.states["t of weight"].shape == ()
    assert made.steps[0].states["prev_flat_grad of bias"] == summary(torch.ones(3))


def test_factored_states_are_recorded_with_their_places():
    net, kept = sliced()
    shapes = {"row_var of weight": (8, 1), "col_var of weight": (1, 5), "step of weight": ()}
    made = recorded(net, torch.optim.Adafactor(net.parameters()), kept, shapes)
    rows, columns = made.states["row_var of weight"], made.states["col_var of weight"]
    assert (rows.shape, rows.held.told, rows.held.covers) == ((8, 1), "dim 0: 0 to 2 of 8", "")
    assert (columns.shape, columns.held.told, columns.held.covers) == ((1, 5), "all", "dim 0: 0 to 2 of 8")
    assert made.states["step of weight"].shape == made.states["step of bias"].shape == ()
    assert made.states["variance of bias"].shape == (3,)
    unknown = recorded(net, torch.optim.Adafactor(net.parameters()), kept, {}).states["row_var of weight"]
    assert unknown.unplaced == "its shape [3, 1] is not that of the slice that the rank trains"


def test_a_state_that_is_no_tensor_is_undecided():
    one, other = keeping(ONE), keeping(trace(0, 1, RIGHT))
    event = {"event": "unread", "after": 0, "name": "own of net.weight", "of": "net.weight", "type": "Factors"}
    for here, there in (([event], [event]), ([event], []), ([], [event])):
        one.events[:], other.events[:] = here, there
        found = verdict(one, [other])
        reason = "its type Factors is neither a number nor a tensor that compare can read"
        assert found.not_compared == {"own of net.weight": reason}
        assert found.report.headline == "undecided: 1 state of optimizers or buffer was not compared with one device"
    one.events[:] = other.events[:] = []


def test_a_state_that_only_some_runs_on_one_device_have_is_undecided():
    """As a direction of LBFGS, whose number of iterations depends on rounding."""
    ranks = [keeping(made, own=(GRADIENT, None)) for made in ranks_of(RIGHT, RIGHT)]
    one = keeping(ONE, own=(GRADIENT, None))
    for others, missed in (([one], []), ([one, keeping(ONE)], ["own of net.weight"])):
        found = verdict_of(Aligned(one, ranks), Rounding(one, others), None)
        assert (found.kind, list(found.not_compared)) == ("undecided" if missed else "equal", missed)
    least = torch.full((), torch.inf)
    one = keeping(ONE, least=(least, None))
    ranks = [keeping(made, least=(least, None)) for made in ranks_of(RIGHT, RIGHT)]
    assert verdict(one, ranks).kind == "equal"  # a least loss before the first one


EQUAL = "equal: 3 steps on 2 ranks train the same 3 parameters"
ONE_SLICE = (
    "on rank 1 the slice of the gradient of up is 3 times that of one device, and the other slices are right; "
    "backward at train.py:84 leaves the gradient of one device, and a later operation changes it"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "told"),
    [
        ("at-use", 0, EQUAL),
        ("reduced", 0, EQUAL),
        ("sums", 2, "and their mean is not that of one device"),
        ("adafactor", 1, "from its own slice (dim"),
        ("scaled", 1, ONE_SLICE),
        ("lbfgs", 1, "change bias by different amounts, with different values of t of up"),
    ],
)
def test_a_script_with_such_an_optimizer(compare, kind, code, told):
    assert told in compare(script("factored"), code=code, arguments=[kind], more=2).text
