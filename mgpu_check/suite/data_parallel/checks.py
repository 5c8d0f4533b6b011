"""Check DataParallel: arguments, outputs, modes and exceptions of replicas, what these hold, and training.

Values are compared bit for bit with those of the module on the CPU, and training with that of one device, on whole
numbers whose sums do not round. Each message names the wrong device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import parallel
from torch.nn.parallel import DataParallel
from torch.utils import _pytree as pytree

from mgpu_check.asserts.collectives import assert_gathered
from mgpu_check.asserts.known_defects import known_defect
from mgpu_check.asserts.models import assert_same
from mgpu_check.errors import CheckFailure, GradientMismatch, ReplicaMismatch, ShardError
from mgpu_check.oracles.generated_data import significands
from mgpu_check.oracles.training import reference_training as oracle
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.models import Everything
from mgpu_check.oracles.training.reference_training import OneDevice, Rows
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.torch_hooks.tensors import name_of

Devices = Sequence[torch.device]


def both_ways(devices: Devices) -> list[list[torch.device]]:
    """Return the devices in the given order and in reverse; one of the two orders does not ascend."""
    return [list(devices), list(devices)[::-1]] if len(devices) > 1 else [list(devices)]


def indices_of(devices: Devices) -> list[int]:
    return [device.index for device in devices]


def told(order: Devices) -> list[int] | None:
    """Return the indices of devices, or None if they are all devices in order, which is the default of DataParallel."""
    indices = indices_of(order)
    return None if indices == list(range(torch.cuda.device_count())) else indices


def distinct_rows(rows: int, seed: int, width: int = 6) -> torch.Tensor:
    """Return distinct whole numbers, (rows, width), float32 on the CPU."""
    return torch.randperm(rows * width, generator=torch.Generator().manual_seed(seed)).view(rows, width).float() - 7


@contextlib.contextmanager
def refused_by_mistake(label: str) -> Iterator[None]:
    """Report an exception in the body as a failure: operators refuse parts that do not fit each other."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if type(error) not in (RuntimeError, TypeError):
            raise  # subclasses mean trouble with a device, such as full memory
        raise GradientMismatch(f"{label} raised {type(error).__name__}: {error}") from error


def require_same(label: str, got: Any, expected: Any, device: torch.device, ranks: Sequence[int] = ()) -> None:
    """Assert that two nested results agree in structure, types and bits, and that tensors of `got` are on `device`."""
    _require_alike(GradientMismatch, label, got, expected, device, ranks)
    forms = [pytree.tree_structure(tree) for tree in (got, expected)]
    if forms[0] != forms[1]:  # keys in another order
        raise GradientMismatch(f"{label} has the form {forms[0]}, expected {forms[1]}", ranks=ranks)


def _require_alike(
    error_type: type[CheckFailure], label: str, got: Any, expected: Any, device: torch.device, ranks: Sequence[int]
) -> None:
    try:
        assert_gathered(expected, got, device)
    except ShardError as error:
        text = str(error).removeprefix("gathered ").removeprefix("batch").replace("shard 0 is nested differently: ", "")
        raise error_type(f"{label}{text}", ranks=ranks) from None


_WIDTH = 6
_LARGE_ROWS = 9001  # columns of one output: thirty rows of it exceed 1 MiB


def _named(devices: Devices) -> str:
    return f"DataParallel on {', '.join(map(str, devices))}"


class _Several(nn.Module):
    """A module with outputs of different shapes, dtypes and containers, all with different values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(_WIDTH)))

    def forward(self, x: torch.Tensor) -> Any:
        scaled = x * self.weight
        return (
            scaled,
            -scaled,
            {"sum": scaled.sum(1).long(), "none": None, "pair": [x.to(torch.bfloat16), (x > 0, x.double() + 0.5)]},
            x[:, :1].expand(-1, _LARGE_ROWS).contiguous(),
        )


def assert_outputs_ordered(devices: Devices, rows: int, position: int, seed: int) -> None:
    """Assert that outputs of all forms are gathered whole and in order on the output device.
    The output device is the default, which is the first, or the one at `position`, modulo the number of devices."""
    x = distinct_rows(rows, seed)
    expected = _Several()(x)
    for number, order in enumerate(both_ways(devices)):
        model = _Several().to(order[0])
        home = order[(position + number) % len(order)]
        for output_device in (None, home):
            wrapped = DataParallel(model, device_ids=told(order), output_device=output_device)
            if wrapped.device_ids != indices_of(order):
                raise GradientMismatch(f"{_named(order)}: it has devices {wrapped.device_ids}")
            got = wrapped(x)
            at = order[0] if output_device is None or len(order) == 1 else output_device
            require_same(f"{_named(order)}, output_device={output_device}: the output", got, expected, at)


class _SumModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * self.weight


def assert_scalars_gathered(devices: Devices, rows: int, seed: int) -> None:
    """Assert that a module with a scalar output gives one scalar per replica, in order, with the right gradients."""
    for order in both_ways(devices):
        x = distinct_rows(rows, seed)
        model = _SumModule().to(order[0])
        with warnings.catch_warnings():
            # DataParallel warns that it gathers scalars into a vector.
            warnings.simplefilter("ignore", UserWarning)
            got = DataParallel(model, device_ids=indices_of(order))(x)
        shards = x.chunk(len(order))
        sums = torch.stack([shard.sum() for shard in shards])
        expected = sums * 3 if len(order) > 1 else (sums * 3)[0]
        require_same(f"{_named(order)}: the scalars", got.detach(), expected, order[0])
        factors = torch.arange(1.0, len(shards) + 1)
        (got * factors.to(order[0])).sum().backward()
        gradient = model.weight.grad
        require_same(f"{_named(order)}: the gradient of the weight", gradient, (sums * factors).sum(), order[0])


def assert_dimension_split(devices: Devices, rows: int, seed: int) -> None:
    """Assert that dim=1 splits and joins columns, also of a square batch, and splits columns of keyword arguments."""
    x = distinct_rows(5, seed, max(rows, 1))
    # One row: a wrong split by rows would give all of it to one replica.
    y = distinct_rows(1, seed + 1, max(rows, 1))
    for order in both_ways(devices):
        label = f"{_named(order)}, dim=1"
        square = distinct_rows(2 * len(order) + 1, seed + 2, 2 * len(order) + 1)
        for name, batch in (("output", x), ("output of a square batch", square)):
            # Running sums along the columns of a shard show how the batch was split.
            expected = torch.cat([shard.cumsum(1) for shard in batch.chunk(len(order), 1)], 1)
            got = DataParallel(_RunningSums().to(order[0]), device_ids=indices_of(order), dim=1)(batch)
            require_same(f"{label}: the {name}", got, expected, order[0])
        model = _RecordingModule().to(order[0])
        DataParallel(model, device_ids=indices_of(order), dim=1)(x, y=y)
        shards = [{"y": own} for own in y.chunk(len(order), 1)]
        _require_noted(model, order, label, "kwargs", shards, ", keyword arguments")


class _RunningSums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class _RecordingModule(nn.Module):
    """A module that records arguments, device and modes of each replica's call, and returns its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.part = nn.Identity()
        self.notes: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        note = {
            "device": self.weight.device,
            "current": torch.cuda.current_device(),
            "grad": torch.is_grad_enabled(),
            "training": self.training,
            "training of a part": self.part.training,
            "autocast": torch.is_autocast_enabled("cuda"),
            "args": args,
            "kwargs": kwargs,
        }
        with self.lock:
            self.notes.append(note)
        x = args[0] if args else kwargs["x"] if "x" in kwargs else kwargs["more"][0]["x"]
        return torch.as_tensor(x) + self.weight


def _in_order(notes: list[dict[str, Any]], order: Devices, label: str, count: int) -> list[dict[str, Any]]:
    """Return the notes of the replicas in the order of the devices, if each of the first `count` devices has one."""
    at = {device: [note for note in notes if note["device"] == device] for device in order}
    called = [len(at[device]) for device in order]
    if called != [1] * count + [0] * (len(order) - count):
        text = ", ".join(f"{device} {times}" for device, times in zip(order, called, strict=True))
        text = f"calls of replicas per device: {text}; expected one on each of the first {count}"
        raise GradientMismatch(f"{label}: {text}")
    return [at[device][0] for device in order[:count]]


def _require_noted(
    model: _RecordingModule, order: Devices, label: str, name: str, expected: Sequence[Any], suffix: str = ""
) -> None:
    for device, note, own in zip(order, _in_order(model.notes, order, label, len(expected)), expected, strict=False):
        require_same(f"{label}: the replica on {device}{suffix}", note[name], own, device, [device.index])


def _arguments(
    x: torch.Tensor, y: torch.Tensor, double: torch.Tensor, flags: torch.Tensor, *, positional: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = (x, [y, "word"]), {"more": {"d": (double, 7)}, "flags": flags, "text": "a word", "nothing": None}
    return (args, kwargs) if positional else ((), kwargs | {"x": x, "y": [y, "word"]})


def assert_arguments_arrive(devices: Devices, rows: int, positional: bool, seed: int) -> None:
    """Assert that each replica gets its part of tensors on its device, and other arguments unchanged.
    With the devices in the given order tensors are positional if `positional`, and in the reverse order if not."""
    for order in both_ways(devices):
        x = distinct_rows(rows, seed + 2)
        model, label = _RecordingModule().to(order[0]), f"{_named(order)}, tensors in keyword arguments alone"
        DataParallel(model, device_ids=indices_of(order))(more=[{"x": x, "none": None}, 7])
        expected: list[Any] = [{"more": [{"x": own, "none": None}, 7]} for own in x.chunk(len(order))]
        _require_noted(model, order, label, "kwargs", expected)
    for number, order in enumerate(both_ways(devices)):
        x, y = distinct_rows(rows, seed), distinct_rows(rows, seed + 1).long()
        wholes, by_place = (x, y, x.double(), y > 3), (positional + number) % 2 > 0
        model = _RecordingModule().to(order[0])
        args, kwargs = _arguments(*wholes, positional=by_place)
        DataParallel(model, device_ids=indices_of(order))(*args, **kwargs)
        shards = zip(*(tensor.chunk(len(order)) for tensor in wholes), strict=True)
        expected = [_arguments(*shard, positional=by_place) for shard in shards]
        _require_noted(model, order, _named(order), "args", [own for own, _ in expected], ", positional arguments")
        _require_noted(model, order, _named(order), "kwargs", [own for _, own in expected], ", keyword arguments")


def assert_few_rows_use_few_devices(devices: Devices, seed: int) -> None:
    """Assert that a batch with fewer rows than devices uses the first ones, one row on each; without rows, one."""
    for order in both_ways(devices):
        for rows in {0, 1, max(1, len(order) - 1)}:
            x = distinct_rows(rows, seed)
            model = _RecordingModule().to(order[0])
            got = DataParallel(model, device_ids=indices_of(order))(x)
            label = f"{_named(order)}, a batch of {rows} rows"
            require_same(f"{label}: the output", got.detach(), x, order[0])
            # DataParallel splits as torch.chunk, which may give fewer parts than requested.
            _in_order(model.notes, order, label, max(1, len(x.chunk(len(order)))))


def assert_modes_seen(devices: Devices, inference: bool, seed: int) -> None:
    """Assert that threads of replicas have the caller's training flag, gradient mode, autocast, and own devices.
    Calls without gradients are in inference mode if `inference`; in the reverse order of devices if not."""
    for number, order in enumerate(both_ways(devices)):
        x = distinct_rows(2 * len(order), seed)
        for index in range(8):
            training, grad, cast = bool(index & 1), bool(index & 2), bool(index & 4)
            model = _RecordingModule().to(order[0])
            parallel = DataParallel(model, device_ids=indices_of(order)).train(training)
            model.part.train(not training)  # as a frozen part of a model that trains
            inferred = not grad and bool((inference + number) % 2)
            before = torch.cuda.current_device()
            with (
                torch.inference_mode(inferred),
                torch.set_grad_enabled(grad),
                torch.autocast("cuda", torch.float16, cast),
            ):
                got = parallel(x)
            label = f"{_named(order)}, training={training}, gradients={grad}, autocast={cast}"
            for note in _in_order(model.notes, order, label, len(order)):
                device = note["device"]
                for mode, expected in {
                    "training": training,
                    "training of a part": not training,
                    "grad": grad,
                    "autocast": cast,
                    # With a single device, DataParallel calls the module in the caller's thread and device.
                    "current": device.index if len(order) > 1 else before,
                }.items():
                    if note[mode] != expected:
                        message = f"{label}: on {device} {mode} is {note[mode]}, expected {expected}"
                        raise GradientMismatch(message, ranks=[device.index])
            if got.requires_grad != grad:
                raise GradientMismatch(f"{label}: requires_grad of the output is {got.requires_grad}, expected {grad}")
            if torch.cuda.current_device() != before:
                message = f"{label}: the current device is {torch.cuda.current_device()} afterwards, {before} before"
                raise GradientMismatch(message)


def assert_autocast_dtype_kept(devices: Devices, seed: int) -> None:
    """Assert that replicas compute in the dtype of the caller's autocast."""
    for order in both_ways(devices):
        parallel = DataParallel(nn.Linear(_WIDTH, 2).to(order[0]), device_ids=indices_of(order))
        x = distinct_rows(2 * len(order), seed)
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cuda", dtype):
                outputs = [shard.dtype for shard in parallel(x).chunk(len(order))]
            facts = {"dtype": name_of(dtype), "devices": len(order)}

            def explained(outputs: list[torch.dtype] = outputs) -> None:
                assert outputs == [torch.float16] * len(outputs)

            with known_defect("data-parallel-autocast-dtype", explained=explained, **facts):
                if outputs != [dtype] * len(outputs):
                    raise GradientMismatch(f"{_named(order)}: under autocast to {dtype} outputs are of {outputs[0]}")


class _Refusing(nn.Module):
    def __init__(self, exception_type: type[Exception]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.exception_type = exception_type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == -1).any()):
            raise self.exception_type(f"refused {int((x == -1).sum())} rows")
        return x + self.weight


def assert_exceptions_named(devices: Devices, position: int, exception_type: type[Exception]) -> None:
    """Assert that an exception in a replica keeps its type and text, and names replica and device; the next call works.
    The replica at `position`, modulo the number of devices, raises it."""
    for number, order in enumerate(both_ways(devices)):
        at = (position + number) % len(order)
        x = torch.arange(float(2 * len(order))).view(-1, 1)
        spoilt = x.clone()
        spoilt[2 * at] = -1
        parallel = DataParallel(_Refusing(exception_type).to(order[0]), device_ids=indices_of(order))
        label = f"{_named(order)}: {exception_type.__name__} in replica {at}, on {order[at]},"
        words = ["refused 1 rows"] + ([f"replica {at}", f"device {order[at].index}"] if len(order) > 1 else [])
        try:
            parallel(spoilt)
        except Exception as error:
            if type(error) is not exception_type or not all(name in str(error) for name in words):
                text = f"was raised as {type(error).__name__}: {error}; its text must contain {', '.join(words)}"
                raise GradientMismatch(f"{label} {text}", ranks=[order[at].index]) from error
        else:
            raise GradientMismatch(f"{label} was not raised", ranks=[order[at].index])
        require_same(f"{_named(order)}, after an exception: the output", parallel(x).detach(), x, order[0])


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[3.0]]))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | float = 0.0, sign: int = 1) -> torch.Tensor:
        return sign * (x * self.weight) + shift


def assert_functional_form_agrees(devices: Devices, rows: int, position: int, seed: int) -> None:
    """Assert that `data_parallel`, with each of its arguments, gives the outputs and gradients of the module.
    Its four parts must do so too. The output device is the one at `position`, modulo the number of devices."""
    x, shift, factors = (distinct_rows(max(rows, 1), seed + number) for number in range(3))
    for number, order in enumerate(both_ways(devices)):
        _assert_parts_agree(order, x)
        for dim in (0, 1):
            home = order[(position + number + dim) % len(order)]
            model, alone = _Scaled().to(order[0]), _Scaled()
            keywords = {"shift": shift, "sign": -1}
            label = f"data_parallel on {', '.join(map(str, order))}, output_device={home}, dim={dim}"
            with refused_by_mistake(label):
                got = parallel.data_parallel(model, x, told(order), home, dim, keywords)
            expected = alone(x, **keywords)
            require_same(f"{label}: the output", got.detach(), expected.detach(), home if len(order) > 1 else order[0])
            (got * factors.to(got.device)).sum().backward()
            (expected * factors).sum().backward()
            require_same(f"{label}: the gradient", model.weight.grad, alone.weight.grad, order[0])


def _assert_parts_agree(order: Devices, x: torch.Tensor) -> None:
    """Assert that scatter, replicate, parallel_apply and gather give the outputs and gradients of the module."""
    model, indices = _Scaled().to(order[0]), indices_of(order)
    inputs = parallel.scatter(x.to(order[0]), indices)
    keywords = [{"shift": float(number), "sign": -1} for number in range(len(inputs))]
    outputs = parallel.parallel_apply(parallel.replicate(model, indices)[: len(inputs)], inputs, keywords)
    got = parallel.gather(outputs, order[-1])
    label = f"scatter, replicate, parallel_apply and gather on {', '.join(map(str, order))}"
    shifts = torch.cat([torch.full((len(shard), 1), float(number)) for number, shard in enumerate(inputs)])
    require_same(f"{label}: the output", got.detach(), x * -3 + shifts, order[-1])
    got.sum().backward()
    require_same(f"{label}: the gradient", model.weight.grad, -x.sum().view(1, 1), order[0])


def assert_replicas_hold(devices: Devices, seed: int) -> None:
    """Assert that each replica holds the module's parameters and buffers bit for bit, on its device, in the same
    structure."""
    source = Everything(seed)
    tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for order in both_ways(devices):
        model = Everything(seed).to(order[0])
        for detach in (False, True):
            replicas: Any = parallel.replicate(model, indices_of(order), detach)
            for device, replica in zip(order, replicas, strict=True):
                label = f"replicate to {', '.join(map(str, order))}, detach={detach}: the replica on {device}"
                for name, expected in tensors.items():
                    _require_held(label, name, _found(replica, name), expected, device, detach)
                if replica.twin is not replica.inner or _found(replica, "inner.weight") is not _found(replica, "tied"):
                    message = f"{label} does not share the parameters that the module shares"
                    raise ReplicaMismatch(message, ranks=[device.index])
    _many_buffers(devices, seed)


_LARGE_ELEMENTS = (1 << 20) + 3
"""Elements of float32; four such parameters exceed the 10 MiB that torch copies, and sums, at a time."""


def _many_buffers(order: Devices, seed: int) -> None:
    """Require that replicas hold a model of more than 16 MiB, and that the gradients of all replicas are summed."""
    values = significands((_LARGE_ELEMENTS,), torch.float32, seed)
    # Each parameter has different values and a different gradient, so that swapped ones are detected.
    model = nn.ParameterList(values * 2.0**position for position in range(4)).to(order[0])
    replicas: Any = parallel.replicate(model, indices_of(order))
    terms = []
    for number, (device, replica) in enumerate(zip(order, replicas, strict=True), start=1):
        label = f"replicate of more than 16 MiB to {', '.join(map(str, order))}: the replica on {device}"
        for position, parameter in enumerate(model):
            own = replica[position]
            if own.device != device or not torch.equal(own.detach().to(order[0]), parameter.detach()):
                raise ReplicaMismatch(f"{label} does not hold parameter {position}", ranks=[device.index])
            terms.append(own.sum().to(order[0]) * number * (position + 1))
    sum(terms[1:], terms[0]).backward()
    for position, parameter in enumerate(model):
        expected = len(order) * (len(order) + 1) // 2 * (position + 1)
        if parameter.grad is None or not bool((parameter.grad == expected).all()):
            subject = f"gradients of more than 16 MiB on {', '.join(map(str, order))}"
            raise ReplicaMismatch(f"{subject}: that of parameter {position} is not {expected} everywhere")


def _found(replica: nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), replica)


def _require_held(label: str, name: str, got: Any, expected: torch.Tensor, device: torch.device, detach: bool) -> None:
    ranks = [device.index]
    _require_alike(ReplicaMismatch, f"{label}: {name}", got, expected, device, ranks)
    # Not for detached replicas, which need no gradients: on the first device they are the module's own tensors.
    if not detach and got.requires_grad != expected.requires_grad:
        raise ReplicaMismatch(f"{label}: requires_grad of {name} is {got.requires_grad}", ranks=ranks)


def _wrapped(model: nn.Module, order: Devices) -> nn.Module:
    return DataParallel(model.to(order[0]), device_ids=indices_of(order))


def _shards(batch: Rows, order: Devices) -> list[Rows]:
    return list(zip(*(tensor.chunk(len(order)) for tensor in batch), strict=True))


def _label(run: WholeRun, order: Devices, suffix: str = "") -> str:
    return f"DataParallel of {run.model} on {', '.join(map(str, order))}{suffix}"


def assert_models_train(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that outputs, gradients and parameters of every step equal those of one device, in both orders in turn."""
    with oracle.exact_arithmetic():
        for number, run in enumerate(runs):
            orders = both_ways(devices)
            _train(run, orders[(run.seed + number) % len(orders)])


def assert_frozen_parameters_kept(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that a model with a frozen first layer trains, and that this layer does not change or get a gradient."""
    with oracle.exact_arithmetic():
        for run, order in itertools.product(runs, both_ways(devices)):
            _train(run, order, frozen=True)


def _train(run: WholeRun, order: Devices, frozen: bool = False) -> None:
    prepare = oracle.freeze_first if frozen else oracle.as_it_is
    reference, model = OneDevice(run, order[0], prepare), run.build()
    prepare(model)
    parallel = _wrapped(model, order)
    optimizer = run.optimize(model)
    for number, batch in enumerate(run.batches(), start=1):
        x, targets = batch
        label = _label(run, order, ", first layer frozen" if frozen else "")
        expected = reference.outputs(x)
        optimizer.zero_grad()
        outputs = parallel(x)
        assert_same({"outputs": outputs}, {"outputs": expected}, f"{label}, step {number}")
        weighted(outputs, targets.to(order[0])).backward()
        shard_gradients = reference.parts(_shards(batch, order))
        oracle.assert_gradients_are(model, shard_gradients, label=f"{label}, gradients of step {number}")
        optimizer.step()
        reference.step(oracle.total(shard_gradients))
        got, right = oracle.parameters_of(model), oracle.parameters_of(reference.held)
        assert_same(got, right, f"{label}, parameters after step {number}")
        oracle.settle(model, run.most)
        reference.settle()


def assert_statistics_of_the_first_device(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that in training only the first device's shard changes buffers, and that evaluation does not change them.
    All replicas must start with the module's buffers: their outputs depend on these."""
    with oracle.exact_arithmetic():
        for run, order in itertools.product(runs, both_ways(devices)):
            model = run.build()
            reference = OneDevice(run, order[0])
            parallel = _wrapped(model, order)
            for number, (x, _) in enumerate(run.batches(), start=1):
                evaluated = number % 2 == 0
                parallel.train(not evaluated)
                label = _label(run, order, f", batch {number}, {'evaluation' if evaluated else 'training'}")
                before = {name: value.cpu().clone() for name, value in oracle.buffers_of(model).items()}
                oracle.put_buffers(reference.exact, before)
                expected = reference.outputs(x)
                with torch.no_grad():
                    outputs = parallel(x)
                assert_same({"outputs": outputs}, {"outputs": expected}, label)
                head_shard = x.chunk(len(order))[0]
                if not evaluated:
                    before = oracle.counting_statistics(before, head_shard)
                assert_same(oracle.buffers_of(model), before, f"{label}, buffers")
        for order in both_ways(devices):
            _average(order, runs[0].seed)


def _average(order: Devices, seed: int) -> None:
    layer = oracle.averaging().to(order[0])
    parallel = _wrapped(layer, order)
    batches = oracle.drawn(3 * len(order), seed)
    for number, batch in enumerate(batches, start=1):
        with torch.no_grad():
            parallel(batch)
        deviation = oracle.wrong_statistics(layer, [before.chunk(len(order))[0] for before in batches[:number]])
        if deviation:
            subject = f"DataParallel of BatchNorm on {', '.join(map(str, order))}, momentum=None"
            raise GradientMismatch(f"{subject}: {deviation}", ranks=[order[0].index])


def assert_backward_of_several_calls(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that two forward passes before a backward pass add gradients, and later passes use changed parameters."""
    with oracle.exact_arithmetic():
        for run, order in itertools.product(runs, both_ways(devices)):
            reference, model = OneDevice(run, order[0]), run.build()
            parallel = _wrapped(model, order)
            earlier, later = run.batches()[0], run.batches()[-1]
            for number in range(2):
                label = _label(run, order, f", two calls before one backward pass, round {number + 1}")
                model.zero_grad()
                losses = [weighted(parallel(x), targets.to(order[0])) for x, targets in (earlier, later)]
                (losses[0] + losses[1]).backward()
                shard_gradients = reference.parts([*_shards(earlier, order), *_shards(later, order)])
                oracle.assert_gradients_are(model, shard_gradients, label=label)
                with torch.no_grad():
                    # In place, as in load_state_dict and optimizers.
                    for mine, exact in zip(model.parameters(), reference.exact.parameters(), strict=True):
                        mine.neg_()
                        exact.neg_()


def assert_hooks_called(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that hooks are called as documented, and that hooks can change arguments and outputs."""
    with oracle.exact_arithmetic():
        for run, order in itertools.product(runs, both_ways(devices)):
            _call_hooks(run, order)
        for order in both_ways(devices):
            module = _Shifted()
            module.register_forward_pre_hook(
                lambda _, arguments, named: (arguments, {"shift": 2 * arguments[0] + 1}), with_kwargs=True
            )
            module.register_forward_hook(
                lambda _, arguments, named, output: 4 * output + named.get("shift", 0), with_kwargs=True
            )
            x = torch.arange(2.0 * len(order) + 1, device=order[0])
            got = _wrapped(module, order)(x)
            label = f"DataParallel on {', '.join(map(str, order))}, hooks that change arguments and outputs"
            assert_same({"outputs": got}, {"outputs": 4 * (3 * x + 1) + 2 * x + 1}, label)


class _Shifted(nn.Module):
    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
        return x + shift


def _call_hooks(run: WholeRun, order: Devices) -> None:
    reference, model = OneDevice(run, order[0]), run.build()
    parallel = _wrapped(model, order)
    replicas: dict[str, list[torch.device]] = {}
    wholes: list[torch.device] = []
    gradients: list[torch.Tensor] = []
    layer = next(model.children())
    names = "forward pre-hook", "forward hook"
    registers: tuple[Any, ...] = layer.register_forward_pre_hook, layer.register_forward_hook
    for (hook_type, register), keywords in itertools.product(zip(names, registers, strict=True), (False, True)):
        called = replicas[f"{hook_type}, with_kwargs={keywords},"] = []
        hook: Any = functools.partial(lambda called, module, arguments, *_: called.append(arguments[0].device), called)
        register(hook, with_kwargs=keywords)
    parallel.register_forward_hook(lambda module, arguments, output: wholes.append(output.device))
    name, parameter = next(model.named_parameters())
    parameter.register_hook(gradients.append)
    x, targets = run.batches()[0]
    weighted(parallel(x), targets.to(order[0])).backward()
    label = _label(run, order)
    used_devices = list(order[: len(_shards((x, targets), order))])
    for hook_type, places in replicas.items():
        got = sorted(map(str, places))
        if got != sorted(map(str, used_devices)):
            text = f"the {hook_type} of a layer was called on {', '.join(got) or 'no device'}"
            raise GradientMismatch(f"{label}: {text}, expected once on each replica")
    if wholes != [order[0]]:
        text = f"the forward hook of DataParallel was called {len(wholes)} times, expected once on {order[0]}"
        raise GradientMismatch(f"{label}: {text}")
    expected = oracle.total(reference.parts(_shards((x, targets), order)))[name]
    if len(gradients) != 1:
        raise GradientMismatch(f"{label}: the hook of {name} was called {len(gradients)} times, expected once")
    assert expected is not None
    assert_same({name: gradients[0]}, {name: expected}, f"{label}: the argument of a hook")
