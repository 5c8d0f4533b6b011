"""Check the tensors of a model: replicas are the same, bit for bit, and a parallel step gives what one device gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mgpu_check.errors import GradientMismatch, ReplicaMismatch
from mgpu_check.numerics.differences import diagnose, difference, show
from mgpu_check.numerics.steps import MeasuredStep
from mgpu_check.torch_hooks.nested import named_buffers, named_parameters
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, as_real, name_of, plain

State = Mapping[str, torch.Tensor]


def assert_replicas_agree(
    replicas: nn.Module | State | Sequence[nn.Module | State],
    *,
    group: dist.ProcessGroup | None = None,
    what: str = "replicas",
) -> None:
    """Assert that replicas hold the same tensors, bit for bit.

    The members of a sequence are compared with each other, in this process. With one module or mapping, every rank of
    `group` must call this function with its own, and they are compared across the ranks. This is a collective, of 16
    bytes per rank if all agree.

    Args:
        replicas: modules, compared by their parameters and buffers, or mappings. Tensors may be on any device; for an
            NCCL group they must be on the devices of the ranks.
        group: the ranks that hold the replicas; the default process group if not given.
        what: the name of the replicas, for the message.

    Raises:
        ReplicaMismatch: on the ranks that differ from most others, or from the first if there is no majority. Names the
            first tensor that differs, with its worst element. `.ranks` has the ranks that differ.
        ValueError: the sequence is empty.
    """
    __tracebackhide__ = True
    if isinstance(replicas, nn.Module | Mapping):
        _across_ranks(_state(replicas), group, what)
        return
    states = [_state(replica) for replica in replicas]
    if not states:
        raise ValueError("assert_replicas_agree: replicas is empty; give at least one")
    prints = [tuple(_fingerprints(state)) for state in states]
    usual = max(prints, key=prints.count)
    model = prints.index(usual)
    odd = [index for index, values in enumerate(prints) if values != usual]
    if odd:
        deviation = _first_difference(states[odd[0]], states[model], f"replica {model}")
        raise ReplicaMismatch(f"{what}: {_differing(odd, 'replica')}: {deviation}", ranks=odd)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a fingerprint of 64 bits over all bits of `tensor`; a change of any single element changes it."""
    words = as_real(plain(tensor)).reshape(-1)
    if words.dtype == torch.bool:
        words = words.to(torch.int8)
    integers = words.view(INTEGER_OF_SIZE[words.element_size()]).long()
    # Odd multipliers are invertible modulo 2^64, so a difference in one element cannot vanish.
    positions = torch.arange(len(integers)) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E019
    return int((integers * (positions | 1)).sum()) if len(integers) else 0


def _state(replica: nn.Module | State) -> dict[str, torch.Tensor]:
    if isinstance(replica, nn.Module):
        return {**dict(named_parameters(replica)), **dict(named_buffers(replica))}
    return dict(replica)


def _fingerprints(state: State) -> list[int]:
    kinds = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in state.items()]
    # Names and shapes first, because the other fingerprints are comparable only if these agree.
    layout = fingerprint(torch.frombuffer(bytearray("\n".join(kinds).encode()), dtype=torch.uint8)) if kinds else 0
    return [layout, *(fingerprint(value) for value in state.values())]


def _across_ranks(state: dict[str, torch.Tensor], group: dist.ProcessGroup | None, subject: str) -> None:
    device = next((value.device for value in state.values()), torch.device("cpu"))
    own = _fingerprints(state)
    combined = fingerprint(torch.tensor(own[1:], dtype=torch.int64))
    values = torch.tensor([own[0], combined], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values, group=group)
    rows: list[list[int]] = [row.tolist() for row in gathered]
    if all(row == rows[0] for row in rows):
        return
    rank = dist.get_rank(group)
    usual = max(rows, key=rows.count)
    model = rows.index(usual)
    odd = [index for index, row in enumerate(rows) if row != usual]
    head = f"{subject}: {_differing(odd, 'rank', f' of {len(rows)}')} from rank {model}"
    if any(row[0] != usual[0] for row in rows):
        if rank in odd:
            entries = [f"{name} {_kind(value)}" for name, value in state.items()]
            on_rank = ", ".join(entries[:6]) + (", …" if len(entries) > 6 else "")
            raise ReplicaMismatch(f"{head} in names, shapes or dtypes; here: {on_rank}", ranks=odd)
        return
    # All ranks have found the difference, so all take part in this broadcast, which locates it.
    source = model if group is None else dist.get_global_rank(group, model)
    deviation: str | None = None
    for name, value in state.items():
        reference = value.detach().clone().contiguous()
        dist.broadcast(reference, source, group=group)
        if deviation is None and fingerprint(reference) != fingerprint(value):
            deviation = _first_difference({name: value}, {name: reference}, f"rank {model}")
    if deviation is not None:
        raise ReplicaMismatch(f"{head}: {deviation}", ranks=odd)


def _first_difference(state: State, reference: State, owner: str) -> str:
    if state.keys() != reference.keys():
        return f"it has {', '.join(state)}; {owner} has {', '.join(reference)}"
    for name, value in state.items():
        expected = reference[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return f"{name!r} is {_kind(value)}, on {owner} {_kind(expected)}"
        if fingerprint(value) == fingerprint(expected):
            continue
        off = difference(value, expected)
        if off is None:
            return f"{name!r} differs from {owner} in the sign of zeros or the bits of NaN only"
        return "; ".join([f"{name!r} is not that of {owner}: {off}", *diagnose(value, expected)])
    return f"nothing by value; compare the layouts with {owner}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {name_of(tensor.dtype)}"


def _differing(indices: Sequence[int], noun: str, among: str = "") -> str:
    plural, verb = ("s", "differ") if len(indices) > 1 else ("", "differs")
    return f"{noun}{plural} {', '.join(map(str, indices))}{among} {verb}"


_SHOWN = 4


def assert_gradients_agree(
    got: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor] | MeasuredStep[str],
    *,
    tolerance: Mapping[str, torch.Tensor | float] | None = None,
    rank: int | None = None,
    parts: Mapping[str, Sequence[torch.Tensor]] | None = None,
    previous: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, float] | None = None,
    what: str = "step",
) -> None:
    """Assert that the named results of a parallel step agree with those of one device.

    There is no default tolerance, because none fits all models. Measure it with
    `mgpu_check.numerics.steps.measure_step`, whose result replaces `expected` and `tolerance`.

    Args:
        got: gradients (or parameters, buffers, outputs) by name, on any device.
        expected: the same names and shapes, in float64 if the values are exact; or a `MeasuredStep`.
        tolerance: for each name the largest error of an element: a number, or a tensor of the shape of the result. 0
            means that the values must be equal.
        rank: the rank that holds `got`, for the message.
        parts: for each name the contribution of each rank to a sum or mean; for the diagnosis.
        previous: the results of the step before; for the diagnosis.
        constants: factors that may explain a difference, by name ("world size": 4); for the diagnosis.
        what: the name of the step under test, for the message.

    Raises:
        GradientMismatch: a result is missing, has another shape, or is off; names result, element, values, ratio and
            diagnosis. `.ranks` holds `rank`.
        ValueError: the tolerance is missing, or lacks a name.
    """
    __tracebackhide__ = True
    if isinstance(expected, MeasuredStep):
        if tolerance is not None:
            raise ValueError("assert_gradients_agree: tolerance is part of a Measurement; give one of them")
        measured = expected
        expected, tolerance = measured.reference, measured.tolerance
    if tolerance is None:
        raise ValueError(
            "assert_gradients_agree: tolerance is missing; give the result of "
            "mgpu_check.numerics.steps.measure_step as expected, or a tolerance for each name (0: equal)"
        )
    without = sorted(expected.keys() - tolerance.keys())
    if without:
        raise ValueError(
            f"assert_gradients_agree: tolerance has no entry for {', '.join(without)}; give one for each name"
        )
    ranks = () if rank is None else (rank,)
    prefix = f"{what}: " if rank is None else f"{what}, rank {rank}: "
    missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or unknown:
        text = "; ".join(
            f"{verb} {', '.join(labels)}" for verb, labels in (("lacks", missing), ("has unknown", unknown)) if labels
        )
        raise GradientMismatch(prefix + text, ranks=ranks)
    lines: list[str] = []
    wrong_count = 0
    for name, value in expected.items():
        if got[name].shape != value.shape:
            finding = f"has shape {tuple(got[name].shape)}, expected {tuple(value.shape)}"
        else:
            off = difference(got[name], value, tolerance[name])
            if off is None:
                continue
            looks = diagnose(
                got[name],
                value,
                tolerance[name],
                contributions=(parts or {}).get(name, ()),
                rank=rank,
                constants=constants,
                previous=(previous or {}).get(name),
            )
            # Results are often copied to the CPU: name the device of a tensor that is still there.
            device = f" on {got[name].device}" if got[name].device.type == "cuda" else ""
            layout = f"{name_of(got[name].dtype)}{list(got[name].shape)}{device}"
            ratio = f" (ratio {show(off.got / off.expected, torch.float32)})" if off.expected else ""
            finding = "; ".join([f"{off}{ratio}", layout, *looks])
        wrong_count += 1
        if len(lines) < _SHOWN:
            lines.append(f"{name}: {finding}")
    if not wrong_count:
        return
    if wrong_count > len(lines):
        lines.append(f"… and {wrong_count - len(lines)} more")
    head, *others = lines
    count = f"{wrong_count} of {len(expected)} results differ from those of one device"
    rest = [count, *others, *_common(got, expected, wrong_count)]
    raise GradientMismatch("\n  ".join([prefix + head, *rest]), ranks=ranks)


def assert_same(
    got: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    subject: str,
    rank: int | None = None,
    constants: Mapping[str, float] | None = None,
) -> None:
    """Assert that results of exact data equal those of one device in every bit, except for the sign of zeros."""
    __tracebackhide__ = True
    tolerance = dict.fromkeys(expected, 0.0)
    assert_gradients_agree(got, expected, tolerance=tolerance, rank=rank, constants=constants, what=subject)


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, or zeros if it is None, because no sample has used the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _common(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], wrong_count: int) -> list[str]:
    """Return a line about a common factor of all results, which is stronger evidence than a factor for each."""
    if wrong_count < len(expected) or wrong_count < 2:
        return []
    pairs = [(plain(got[name]).double(), plain(value).double()) for name, value in expected.items()]
    ratios = torch.cat([(own / reference).flatten() for own, reference in pairs])
    ratios = ratios[ratios.isfinite()]
    if not len(ratios):
        return []
    low, middle, high = (float(ratios.quantile(quantile)) for quantile in (0.1, 0.5, 0.9))
    # Four fifths of all elements are within a thousandth of the median; gradients of another batch would scatter more.
    if high - low > 1e-3 * abs(middle) or abs(middle - 1) <= 1e-3:
        return []
    return [f"all results together are {middle:.5g} times those of one device, in four of five elements or more"]
