"""Run one case of the user's step in a rank, and record all results.

Results are gradients, parameters, buffers, states and returned values. Some of the results go back to the pytest
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_check.diagnosis.observations import CallEvent, ObservedRun, RankTrace, Result
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.engine.rank_side.worker import pause
from mgpu_check.gates.gate_arguments import Program, Unusable, bound, bound_reference, modules_of
from mgpu_check.gates.run.call_events import NotingLabels, Rows, noting_outputs, noting_seeds, traced
from mgpu_check.gates.run.draws import DrawsOfFloat32, redrawing
from mgpu_check.gates.run.shards import Held, Holdings, assembled, least_anywhere, moved_apart, named_tensors
from mgpu_check.gates.run.step_recorder import Nudge, StepRecorder, put
from mgpu_check.gates.search.scenarios import Scenario, coordinates_of, has_equal_lengths, make_batches, mesh_of, wider
from mgpu_check.numerics.steps import full_precision
from mgpu_check.torch_hooks.nested import entries, named_modules, tensors_of
from mgpu_check.torch_hooks.patches import entered, temporarily
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import digest_of, plain_copy

Around = Callable[[Any, Sequence[Any]], contextlib.AbstractContextManager[None]]
"""Called with the model, and with the batches as the steps get them."""


@full_precision()
def observe(
    rank: Rank,
    program: Program,
    scenario: Scenario,
    *,
    of_reference: bool = False,
    double: bool = False,
    deep: bool | str = False,
    traced: bool = False,
    digests: bool = True,
    initial: bool = True,
    histories: bool = False,
    located: Mapping[str, Held] | None = None,
    nudge: Nudge | None = None,
    alter: Callable[[Any], Any] | None = None,
    around: Around = lambda model, batches: contextlib.nullcontext(),
) -> ObservedRun:
    """Build the model, make the batches, and run the step (or the reference) on each batch in turn, without TF32.

    Args:
        of_reference: run the reference instead of the step.
        double: run in float64: widen the model and the batches, and make float64 the default dtype.
        deep: keep the gradients and parameters of each optimizer step; "gradients" for gradients only, "nonlinear" for
            gradients of optimizers that are not linear in them.
        traced: create a step that is a class inside `around`, and note the seeds that `build` sets.
        digests: compute checksums of the values.
        initial: keep the initial values of the model, which show what the step touched.
        histories: keep checksums of the gradients that were applied to each parameter.
        located: `ObservedRun.located` of an unperturbed run.
        nudge: called with the number of the optimizer step, the name and the gradient. It may change the gradient; the
            change is undone after that step.
        alter: applied to each batch.
        around: context around the steps, but not around building the model and the batches.
    """
    if scenario.mesh:
        rank = dataclasses.replace(rank, mesh=mesh_of(rank, scenario.mesh))
    seed_everything(scenario.seed)
    seeds: list[CallEvent] = []
    with noting_seeds(seeds) if traced else contextlib.nullcontext():
        model = _built(program, scenario)
    modules = modules_of(model)
    how = scenario.samples, scenario.steps, scenario.change, scenario.factor, scenario.seed
    batches = make_batches(program.batch, scenario.batches, *how)
    if alter is not None:
        batches = [alter(batch) for batch in batches]
    tensors = tensors_of(batches)
    digest = ",".join(map(digest_of, tensors)) if tensors else _text(batches)
    run = ObservedRun(batch=digest, built=seeds, calls=len(batches))
    if initial:
        run.equal_lengths = has_equal_lengths(batches)
        for _, name, value, _, _ in named_tensors(modules):
            run.initial[name] = plain_copy(value)
    if double:
        _widen(modules)
        batches = [wider(batch) for batch in batches]
    rebuild = functools.partial(_built_again, program, scenario, double)
    holdings = Holdings(modules, rank, program.placement, coordinates_of(rank), rebuild, located)
    make = functools.partial(bound, program.step, model, rank)
    if of_reference and program.reference is not None:
        make = functools.partial(bound_reference, program.reference, model, scenario.world_size)

    # The constructor of a class may draw random numbers: in float64 it must draw the same ones.
    with _default_dtype(double), DrawsOfFloat32() if double else contextlib.nullcontext():
        call = None if traced else make()
    seed_everything(scenario.seed + 1)
    before = torch.get_rng_state()
    of_scenario = rank.size > 1, traced or program.reference is not None, scenario.rewritten, histories
    recorder = StepRecorder(holdings, modules, run, deep, nudge, *of_scenario)
    with _default_dtype(double), recorder, around(model, batches):
        call = call or make()  # traced: the calls of the constructor belong to the trace
        for number, batch in enumerate(batches):
            if number:
                # A dropped DistributedDataParallel removes its hooks when its reducer is freed
                # (pytorch/pytorch#21591). That may be late (pytorch/pytorch#96490), and till then they still run.
                gc.collect()
            returned = call(batch)
            recorder.end_call()
            after_step(number, len(batches), modules)
            if returned is not None:
                result = Result("returned", "", number + 1 if len(batches) > 1 else None)
                _take(run, result, returned, recorder.applied.by_gradient(holdings.now()))
                run.touched.add("returned")
    after = torch.get_rng_state()
    run.rng, run.draws = digest_of(after), not torch.equal(before, after)
    held_tensors = holdings.held()
    run.rewritten = recorder.applied.rewritten
    _take_state(run, modules, held_tensors, recorder)
    beside = [holding for holding in held_tensors if holdings.is_beside_model(holding.tensor)]
    run.located = {holding.label: dataclasses.replace(holding, tensor=torch.empty(0)) for holding in beside}
    run.sharded = {
        name
        for holding in held_tensors
        if any(not placed.is_replicate() for placed in getattr(holding.tensor, "placements", ()))
        for name in holding.wholes
    }
    by_id = {id(holding.tensor): holding for holding in held_tensors}
    recorder.take_steps(by_id)
    recorder.take_optimizers(by_id)
    if rank.size > 1:
        run.unused = holdings.unused(run.trained)
    elif run.pieces:
        (run,) = assembled([run])
    if digests:
        run.digests = {name: digest_of(value) for name, value in run.values.items()}
    return run


def _built(program: Program, scenario: Scenario) -> Any:
    model = program.build()
    if scenario.apart:
        moved_apart(modules_of(model))
    return model


def _built_again(program: Program, scenario: Scenario, double: bool) -> dict[str, nn.Module]:
    """Build the modules again for their initial values, without changing the state of random numbers."""
    with torch.random.fork_rng(devices=[]):
        seed_everything(scenario.seed)
        modules = modules_of(_built(program, scenario))
    if double:
        _widen(modules)
    return modules


def _widen(modules: Mapping[str, nn.Module]) -> None:
    """Convert parameters and buffers to float64, or complex128, in place."""
    for module in modules.values():
        module.double()  # leaves complex values alone (torch/nn/modules/module.py, double, torch 2.13)
    for _, _, value, _, _ in named_tensors(modules):
        if value.dtype == torch.complex64:
            value.data = value.data.to(torch.complex128)


def _take_state(
    run: ObservedRun, modules: Mapping[str, nn.Module], held_tensors: Sequence[Held], recorder: StepRecorder
) -> None:
    gathered = [holding.tensor for holding in held_tensors if not holding.local]
    shared = iter(least_anywhere([(tensor, int(tensor.grad is not None)) for tensor in gathered]))
    for holding in held_tensors:
        has_gradient = holding.tensor.grad is not None if holding.local else bool(next(shared))
        tensor, now, is_parameter = holding.tensor, holding.copy_of(holding.tensor), holding.kind == "params"
        # A replica's gradient is not that of the model, whose own tensor is judged.
        is_replica = holding.outside and holding.copy
        if is_parameter and (tensor.requires_grad or tensor.grad is not None) and not is_replica:
            if tensor.grad is not None:
                run.keeps_gradients = True
                run.trained |= holding.wholes
                if not holding.outside:
                    run.touched.add("grads")
            gradient = holding.copy_of(recorder.applied.of(tensor)) if has_gradient else torch.zeros_like(now)
            if tensor.grad is not None or holding.slices is None or not holding.replaced:
                put(run.values, run.pieces, "grads", "{}", holding, gradient)
                recorder.note_outside("grads", "{}", holding)
        put(run.values, run.pieces, holding.kind, "{}", holding, now)
        recorder.note_outside(holding.kind, "{}", holding)
        if (history := recorder.applied.history(tensor)) and holding.built_name is not None and not holding.outside:
            run.histories[holding.built_name] = history
        before, placed = _before(run.initial, holding)
        if before is None or before.shape != now.shape or not torch.equal(before.to(now.dtype), now):
            run.touched.add(holding.kind)
            if placed:
                run.trained |= holding.wholes
        if holding.idle:
            run.idle |= holding.wholes
        if holding.reason is not None and is_parameter:
            run.unplaced[holding.label] = holding.reason
    for prefix, module in modules.items():
        for name, own in named_modules(module):
            batch_norm = isinstance(own, nn.modules.batchnorm._BatchNorm) and not isinstance(own, nn.SyncBatchNorm)
            run.normalized += [prefix + name] if batch_norm and own.training else []


def _before(initial: Mapping[str, torch.Tensor], holding: Held) -> tuple[torch.Tensor | None, bool]:
    """Return the initial value of a tensor (None if it was not kept), and whether it belongs to the model as built."""
    if holding.slices is None:
        before = initial.get(holding.built_name or holding.label)
        return before, before is not None
    if holding.tensor.is_complex() or any(held_slice.whole not in initial for held_slice in holding.slices):
        return None, True
    before = holding.copy_of(holding.tensor)
    for held_slice in holding.slices:
        flat = initial[held_slice.whole].reshape(-1)
        held_slice.of(before).copy_(flat if held_slice.at is None else flat[held_slice.at])
    return before, True


def _take(run: ObservedRun, name: Result, value: Any, applied: Mapping[int, torch.Tensor]) -> None:
    """Record a returned value by its parts. `applied`: id of a gradient -> the value that the optimizer applied."""
    if (members := entries(value)) is not None:
        for key, member in members:
            _take(run, dataclasses.replace(name, of=f"{name.of}.{key}" if name.of else str(key)), member, applied)
        return
    value = applied.get(id(value), value)
    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        value = torch.from_numpy(np.array(value)) if (np := sys.modules.get("numpy")) else value
    if isinstance(value, torch.Tensor):
        run.values[name] = plain_copy(value)
    elif isinstance(value, (float, complex)):
        wide = torch.complex128 if isinstance(value, complex) else torch.float64
        run.values[name] = plain_copy(torch.tensor(value, dtype=wide))
    elif isinstance(value, int) and abs(value) < 2**63:
        run.values[name] = torch.tensor(value)
    elif isinstance(value, (int, str, bytes)):
        run.others[name] = repr(value)
    elif value is not None:
        raise Unusable(
            f"step returned {name.label or 'a result'} of type {type(value).__name__}; return tensors, numbers or "
            "texts, in mappings, sequences or dataclasses"
        )


def _default_dtype(double: bool) -> contextlib.AbstractContextManager[Any]:
    before = torch.get_default_dtype()
    return temporarily(torch.set_default_dtype, torch.float64 if double else before, before)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return digest_of(torch.as_tensor(value)) if hasattr(value, "__array__") else type(value).__name__


def after_step(number: int, steps: int, modules: Mapping[str, nn.Module]) -> None:
    """Wait for all ranks after a step, and compare their calls; see `pause`."""
    # The gate gathers the sharded gradients of the modules, which needs all ranks of the mesh.
    meshes = ((name, getattr(value.grad, "device_mesh", None)) for _, name, value, _, _ in named_tensors(modules))
    sharded = ((name, mesh.mesh.flatten().tolist()) for name, mesh in meshes if mesh is not None)
    slices = [(f"gradient of {name}", tuple(ranks)) for name, ranks in sharded]
    pause(f"step {number + 1}", last=number + 1 == steps, slices=slices)


_SMALL = 100_000  # most elements whose values every rank sends; above, only rank 0 does, and the others send checksums


def run_step(
    rank: Rank, program: Program, scenario: Scenario, all_values: bool = False, histories: bool = False
) -> ObservedRun:
    """Run the step on this rank and return its results.

    `all_values`: every rank sends all values. `histories`: see `observe`.
    """
    run = observe(_placed(rank, program, scenario), program, scenario, histories=histories)
    if not all_values and sum(value.numel() for value in run.values.values()) > _SMALL:
        run.initial = {}  # only the diagnosis needs it, and that runs the step again
        if rank.index and not run.pieces and not run.unused:
            run.values = {}
    return run


def run_traced(rank: Rank, program: Program, scenario: Scenario, deep: bool = True) -> tuple[ObservedRun, RankTrace]:
    """Run the step on this rank, and return its results with the calls it made.

    `deep`: also return the results after each optimizer step. Divided ones are gathered there, by calls in the trace.
    """
    return _traced(_placed(rank, program, scenario), program, scenario, of_reference=False, deep=deep)


def run_redrawn(rank: Rank, program: Program, scenario: Scenario, times: int) -> ObservedRun:
    """Run the step on this rank with other random numbers from the same seeds; see `redrawing`."""
    placed = _placed(rank, program, scenario)
    return observe(placed, program, scenario, traced=True, around=lambda model, batches: redrawing(times))


def run_traced_alone(rank: Rank, program: Program, scenario: Scenario) -> RankTrace:
    """Return the calls of the reference; without a reference, the calls of the step at world size 1."""
    return _traced(rank, program, scenario, of_reference=program.reference is not None)[1]


def _traced(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, deep: bool = True
) -> tuple[ObservedRun, RankTrace]:
    trace = RankTrace()

    def noting(model: Any, batches: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        outputs = noting_outputs(modules_of(model), trace)
        return entered(NotingLabels(trace.labels), outputs, traced(model, trace, Rows(batches)))

    return observe(rank, program, scenario, of_reference=of_reference, deep=deep, traced=True, around=noting), trace


def _placed(rank: Rank, program: Program, scenario: Scenario) -> Rank:
    return dataclasses.replace(rank, size=scenario.world_size) if program.single_process else rank
