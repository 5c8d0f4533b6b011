"""DataParallel and `data_parallel`: arguments, outputs and modes reach each replica and return bit for bit.

Training uses whole numbers whose sums do not round (`mgpu_check.oracles.training.reference_training`), so no comparison
needs a tolerance. Each check uses the devices in the drawn order and in its reverse.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import examples, whole_runs
from mgpu_check.oracles.training.cases import PLAIN, WholeRun
from mgpu_check.plugin.ranks import Gpus

CHECKS = "mgpu_check.suite.data_parallel.checks"

Runs = tuple[WholeRun, ...]
ORDERS = strategies.device_orders()
SEEDS = strategies.seeds()
RARE = ("float64 inside", "bfloat16 inside", "listed")
ROWS = st.sampled_from((9, 40, 1, 2, 8, 13, 4))
POSITIONS = st.integers(0, 7)  # positions in the list of devices, modulo its length


@examples(14, quick=4)
@given(order=ORDERS, rows=ROWS, position=POSITIONS, seed=SEEDS)
def test_outputs(gpus: Gpus, order: tuple[int, ...], rows: int, position: int, seed: int) -> None:
    """Outputs of all forms (tuples, dicts, None, large ones) arrive whole and in order on any output device."""
    NamedFunction(f"{CHECKS}:assert_outputs_ordered")([gpus[index] for index in order], rows, position, seed)


@examples(14, quick=4)
@given(order=ORDERS, rows=ROWS, seed=SEEDS)
def test_scalars(gpus: Gpus, order: tuple[int, ...], rows: int, seed: int) -> None:
    """Scalar outputs are gathered, one for each replica, and their gradients return to the right replica."""
    NamedFunction(f"{CHECKS}:assert_scalars_gathered")([gpus[index] for index in order], rows, seed)


@examples(14, quick=4)
@given(order=ORDERS, rows=ROWS, seed=SEEDS)
def test_dimension(gpus: Gpus, order: tuple[int, ...], rows: int, seed: int) -> None:
    """With dim=1, DataParallel splits and joins columns."""
    NamedFunction(f"{CHECKS}:assert_dimension_split")([gpus[index] for index in order], rows, seed)


@examples(14, quick=4)
@given(order=ORDERS, rows=ROWS, positional=st.booleans(), seed=SEEDS)
def test_arguments(gpus: Gpus, order: tuple[int, ...], rows: int, positional: bool, seed: int) -> None:
    """Each replica gets its part of nested and keyword tensors on its device, and all other arguments unchanged."""
    NamedFunction(f"{CHECKS}:assert_arguments_arrive")([gpus[index] for index in order], rows, positional, seed)


@examples(14, quick=4)
@given(order=ORDERS, seed=SEEDS)
def test_few_rows(gpus: Gpus, order: tuple[int, ...], seed: int) -> None:
    """A batch with fewer rows than devices uses the first devices only."""
    NamedFunction(f"{CHECKS}:assert_few_rows_use_few_devices")([gpus[index] for index in order], seed)


@examples(14, quick=3)
@given(order=ORDERS, inference=st.booleans(), seed=SEEDS)
def test_modes(gpus: Gpus, order: tuple[int, ...], inference: bool, seed: int) -> None:
    """Replicas have the caller's training flag, gradient mode and autocast in their threads, and their own device."""
    NamedFunction(f"{CHECKS}:assert_modes_seen")([gpus[index] for index in order], inference, seed)


@examples(10, quick=3)
@given(order=ORDERS, seed=SEEDS)
def test_autocast_dtype(gpus: Gpus, order: tuple[int, ...], seed: int) -> None:
    """Replicas compute in the dtype of the caller's autocast, float16 or bfloat16."""
    NamedFunction(f"{CHECKS}:assert_autocast_dtype_kept")([gpus[index] for index in order], seed)


@examples(14, quick=4)
@given(order=ORDERS, position=POSITIONS, kind=st.sampled_from((RuntimeError, ValueError, KeyError)))
def test_exceptions(gpus: Gpus, order: tuple[int, ...], position: int, kind: type[Exception]) -> None:
    """An exception keeps its type and text, and names replica and device; the next call works."""
    NamedFunction(f"{CHECKS}:assert_exceptions_named")([gpus[index] for index in order], position, kind)


@examples(14, quick=4)
@given(order=ORDERS, rows=ROWS, position=POSITIONS, seed=SEEDS)
def test_functional_form(gpus: Gpus, order: tuple[int, ...], rows: int, position: int, seed: int) -> None:
    """`data_parallel` with each of its arguments, and its building blocks, give the module's outputs and gradients."""
    NamedFunction(f"{CHECKS}:assert_functional_form_agrees")([gpus[index] for index in order], rows, position, seed)


@examples(14, quick=3)
@given(order=ORDERS, seed=SEEDS)
def test_replicas(gpus: Gpus, order: tuple[int, ...], seed: int) -> None:
    """Replicas hold parameters and buffers of all dtypes, bit for bit, and share what the module shares."""
    NamedFunction(f"{CHECKS}:assert_replicas_hold")([gpus[index] for index in order], seed)


@examples(14, quick=2)
@given(order=ORDERS, runs=whole_runs(PLAIN), rare=whole_runs(RARE, small=True))
def test_models(gpus: Gpus, order: tuple[int, ...], runs: Runs, rare: Runs) -> None:
    """Models train like on one device: MLP, LeNet, residual block, embedding, attention, tied weights, lists, mixed
    dtypes."""
    NamedFunction(f"{CHECKS}:assert_models_train")([gpus[index] for index in order], [*runs, *rare])


@examples(14, quick=3)
@given(order=ORDERS, runs=whole_runs(("mlp", "residual")))
def test_frozen_parameters(gpus: Gpus, order: tuple[int, ...], runs: Runs) -> None:
    """Frozen parameters get no gradient and stay unchanged."""
    NamedFunction(f"{CHECKS}:assert_frozen_parameters_kept")([gpus[index] for index in order], runs)


@examples(14, quick=3)
@given(order=ORDERS, runs=whole_runs(("counting",), least=3))
def test_buffers(gpus: Gpus, order: tuple[int, ...], runs: Runs) -> None:
    """Buffers are updated by the first device's shard, in training only, and all replicas start from them."""
    NamedFunction(f"{CHECKS}:assert_statistics_of_the_first_device")([gpus[index] for index in order], runs)


@examples(14, quick=3)
@given(order=ORDERS, runs=whole_runs(("mlp",), least=2))
def test_several_calls(gpus: Gpus, order: tuple[int, ...], runs: Runs) -> None:
    """Gradients of two forward passes before one backward pass add up; later passes see in-place changes."""
    NamedFunction(f"{CHECKS}:assert_backward_of_several_calls")([gpus[index] for index in order], runs)


@examples(14, quick=3)
@given(order=ORDERS, runs=whole_runs(("mlp",)))
def test_hooks(gpus: Gpus, order: tuple[int, ...], runs: Runs) -> None:
    """Forward hooks of layers run on each replica, and hooks of parameters get the whole gradient."""
    NamedFunction(f"{CHECKS}:assert_hooks_called")([gpus[index] for index in order], runs)
