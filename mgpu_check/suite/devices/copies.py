"""Check copies between two devices and the host: all bits arrive, and memory around the destination is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.known_defects import is_known
from mgpu_check.devices.observations import Observation
from mgpu_check.errors import DeviceMismatch
from mgpu_check.suite.common.agreement import WrongCase, difference, named_wrong
from mgpu_check.suite.common.values import ALL, anything, significands
from mgpu_check.suite.devices.copy_cases import Copies
from mgpu_check.suite.devices.links import examine_copies, examine_host_copies
from mgpu_check.torch_hooks.tensors import name_of

_HOST = torch.device("cpu")
_MIDDLE, _ABOVE, _LARGE = (1 << 16) + 1, (1 << 20) + 1, (4 << 20) + 1
"""Bytes: just above 64 KiB, 1 MiB and 4 MiB, where drivers and libraries change their method of copying."""
_BORDERS = (1, _MIDDLE - 2, _MIDDLE, _ABOVE)

_CASTS = (
    *((torch.float32, other) for other in (torch.float16, torch.bfloat16, torch.float64)),
    *((torch.float64, torch.float32), (torch.float16, torch.float64), (torch.int64, torch.int32)),
    *((torch.int64, torch.float32), (torch.uint8, torch.int16), (torch.bool, torch.float32)),
    (torch.complex64, torch.complex128),
)


def assert_copies_whole(devices: Sequence[torch.device], seed: int = 0, *, more: bool = False) -> None:
    """Assert that copies of 1 byte, about 64 KiB and 1 MiB arrive, between all devices and from and to the host.

    Copies use a copy engine, a kernel that reads every second byte, or a kernel that converts. They run one after the
    other and all at once, with pinned and pageable memory of the host; some have 4 MiB. Memory around the destination
    must not change.

    Args:
        more: also copy just below 1 MiB, and 4 MiB, by every method and between every two devices.
    """
    further = (_ABOVE - 2, _LARGE) if more else ()
    found = [
        *examine_copies(devices, Copies("engine", (*_BORDERS, *further), seed=seed)),
        *examine_copies(devices, Copies("engine", (_MIDDLE,), 3, 5, together=True, seed=seed)),
        *examine_copies(devices, Copies("strided", (_MIDDLE, *further), 1, 2, seed=seed)),
        *examine_copies(devices, Copies("casting", (_MIDDLE, *further), seed=seed)),
        *examine_host_copies(devices, Copies("engine", (1, _MIDDLE, _LARGE), pinned=True, seed=seed)),
        *examine_host_copies(devices, Copies("engine", (1, _ABOVE, *further), pinned=False, seed=seed)),
        *examine_host_copies(devices, Copies("strided", (_MIDDLE,), pinned=True, seed=seed)),
        *examine_host_copies(devices, Copies("strided", (_MIDDLE - 2,), pinned=False, seed=seed)),
    ]
    seen = [one for one in found if isinstance(one, Observation)]
    wrong = [one for one in seen if one.outcome == "failed"]
    if wrong:
        ways = dict.fromkeys(_way(one, devices) for one in wrong)
        others = len({_way(one, devices) for one in seen}) - len(ways)
        lines = [f"{_way(one, devices)}: {one.case}: {one.seen}" for one in wrong[:6]]
        count = f"{len(ways)} of {len(ways) + others} ways copy wrong data ({', '.join(ways)}), the others are right"
        raise DeviceMismatch(
            "\n".join([f"the copy {lines[0]}", count, *lines[1:]]),
            ranks=sorted({devices[member].index for one in wrong for member in one.subject.members}),
        )


def _way(one: Observation, devices: Sequence[torch.device]) -> str:
    ends = [str(devices[member]) for member in one.subject.members]
    if one.subject.kind == "upload":
        ends.insert(0, "the host")
    elif one.subject.kind == "download":
        ends.append("the host")
    return " -> ".join(ends)


Call = Callable[[torch.Tensor, torch.device], torch.Tensor]


def _into_gaps(x: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy into every second element of a tensor; the other elements must not change."""
    between = torch.zeros(*x.shape, 2, dtype=dtype or x.dtype, device=device)
    between[..., 0].copy_(x)
    if bool(between[..., 1].any()):
        raise RuntimeError("elements beside the destination have changed")
    return between[..., 0]


def _assigned(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    target = torch.zeros(x.shape[0] + 2, *x.shape[1:], dtype=x.dtype, device=device)
    target[1:-1] = x
    if bool(target[0].any()) or bool(target[-1].any()):
        raise RuntimeError("elements beside the destination have changed")
    return target[1:-1]


def _repeated(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy into three tensors of the same shape at once, which must then be equal."""
    target = torch.zeros(3, *x.shape, dtype=x.dtype, device=device).copy_(x)
    if any(not same_bits(target[0], one) for one in target[1:]):
        raise RuntimeError("three copies of one tensor differ")
    return target[2]


def _unwaited(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = x.to(device, non_blocking=True)
    for one in (x.device, device):
        if one.type == "cuda":
            torch.cuda.synchronize(one)
    return copy


_CALLS: dict[str, Call] = {
    "to(device)": lambda x, device: x.to(device),
    "to(str(device))": lambda x, device: x.to(str(device)),
    "to(device, copy=True)": lambda x, device: x.to(device, copy=True),
    "to(device, non_blocking=True)": _unwaited,
    "to(other tensor)": lambda x, device: x.to(torch.empty(0, dtype=x.dtype, device=device)),
    "cuda() or cpu()": lambda x, device: x.cuda(device) if device.type == "cuda" else x.cpu(),
    "copy_": lambda x, device: torch.empty_like(x, device=device).copy_(x),
    "copy_ into gaps": _into_gaps,
    "copy_ to three places": _repeated,
    "assignment to a slice": _assigned,
    "as_tensor": lambda x, device: torch.as_tensor(x, device=device),
    "Module.to": lambda x, device: _module(x).to(device).get_buffer("held"),
}


def _module(x: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("held", x)
    return module


def _pairs(devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.device]]:
    """Return all ordered pairs, with the host; descending pairs first, because most code copies upwards."""
    places = [_HOST, *devices]
    return sorted(((a, b) for a in places for b in places if a != b), key=lambda pair: str(pair[0]) < str(pair[1]))


_WORDS = ("", "transposed ", "gapped ", "channels_last ", "channels_last_3d ")
"""The layouts of the next function in words."""


def _laid_out(data: torch.Tensor, layout: int, device: torch.device) -> torch.Tensor:
    """Return a matrix on a device, in the layout with this number in `_WORDS`; the last two make images of it."""
    if layout > 2:
        images = data.view(2, -1, 2, *data.shape[1:]) if layout == 3 else data.view(2, -1, 2, data.shape[1] // 2, 2)
        formatted = torch.channels_last if layout == 3 else torch.channels_last_3d
        return images.to(device, copy=True).contiguous(memory_format=formatted)
    if layout == 1:
        return data.t().contiguous().to(device, copy=True).t()
    if layout == 2:
        wide = torch.zeros(data.shape[0], 2 * data.shape[1], dtype=data.dtype, device=device)
        wide[:, ::2] = data.to(device)
        return wide[:, ::2]
    return data.to(device, copy=True)


_PRESERVING = ("cuda() or cpu()", *(name for name in _CALLS if name.startswith("to(")), "to(device, dtype)")
"""The calls that torch documents to keep the strides of tensors without gaps."""


Found = list[tuple[tuple[torch.device, torch.device], str, str]]
"""Source and target of a copy, the case, and a description of the error."""


def _names(wrong: Found, devices: Sequence[torch.device], cases: int) -> DeviceMismatch:
    """Return an error that names the only device common to all wrong copies, or else the target of each."""
    common = set.intersection(*({end for end in pair if end.type == "cuda"} for pair, _, _ in wrong))
    (one,) = common if len(common) == 1 else (None,)
    named = [
        WrongCase(one or (pair[1] if pair[1].type == "cuda" else pair[0]), case, what) for pair, case, what in wrong
    ]
    return named_wrong(named, devices, cases, "the source")


def assert_copies_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that every copying call keeps every bit of every dtype and layout, between any two of devices and host.

    Each pair and call tries a third of the dtypes, and the third changes from call to call and from pair to pair.
    Lazily conjugated and lazily negated tensors are tried with each call and pair.
    """
    count, wrong = 0, Found()
    held: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
    for turn, (source, target) in enumerate(_pairs(devices)):
        for number, (name, call) in enumerate(_CALLS.items()):
            for dtype in ALL[(turn + number) % 3 :: 3]:
                layout = (turn + number + count) % len(_WORDS)
                data = anything(120, dtype, seed).view(12, 10)
                key = source, dtype, layout
                if key not in held:
                    held[key] = _laid_out(data, layout, source)
                case = f"{name} of {_WORDS[layout]}{name_of(dtype)} from {source} to {target}"
                if what := _arrived(call, held[key], target, data.view(held[key].shape), kept=name in _PRESERVING):
                    wrong.append(((source, target), case, what))
                count += 1
    for source, target in _pairs(devices):
        for kind, made, data in _lazy(seed):
            there = made(source)
            for name, call in _CALLS.items():
                plain = data.conj().resolve_conj() if data.is_complex() else -data
                what = _arrived(call, there, target, data, lost=plain)
                if what and not (what == _SIGN_LOST and _is_known(name, there, target)):
                    wrong.append(((source, target), f"{name} of {kind} from {source} to {target}", what))
                count += 1
    if wrong:
        raise _names(wrong, devices, count)


def _lazy(seed: int) -> Iterator[tuple[str, Callable[[torch.device], torch.Tensor], torch.Tensor]]:
    """Yield lazily conjugated and negated tensors: a name, a function that makes one on a device, and its values.

    The numbers are finite, because the sign of a NaN need not change.
    """
    data = significands((4, 6), torch.complex64, seed)
    kept, real = data.conj().resolve_conj(), data.real.contiguous()
    yield "complex64, to be conjugated", lambda device: kept.to(device).conj(), data
    lifted = torch.complex(torch.zeros_like(real), -real)
    yield "float32, to be negated", lambda device: lifted.to(device).conj().imag, real


_SIGN_LOST = "its lazy sign is lost"


def _is_known(name: str, source: torch.Tensor, target: torch.device) -> bool:
    return is_known(
        "lazy-signs-between-devices",
        failed=True,
        call=name,
        complex_numbers=source.is_complex(),
        source=source.device.type,
        target=target.type,
    )


def _arrived(
    call: Call,
    source: torch.Tensor,
    target: torch.device,
    expected: torch.Tensor,
    *,
    kept: bool = False,
    lost: torch.Tensor | None = None,
) -> str:
    """Describe the error of a copy, "" without one.

    Args:
        kept: whether the strides of a tensor without gaps must be kept.
        lost: the result if the copy drops the lazy sign of `source`.
    """
    try:
        got = call(source, target)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    if got.device != target:
        return f"it is on {got.device}"
    dense = source.numel() == 1 + sum(
        (size - 1) * step for size, step in zip(source.shape, source.stride(), strict=True)
    )
    if kept and dense and got.stride() != source.stride():
        return f"it has the strides {got.stride()}, expected {source.stride()}"
    what = difference(got, expected, "bits")
    return _SIGN_LOST if what and lost is not None and not difference(got, lost, "bits") else what


def _casting(dtype: torch.dtype, turn: int) -> dict[str, Call]:
    """Return calls that copy and convert to `dtype`; the last of them changes from turn to turn."""
    strided: dict[str, Call] = {
        "copy_ into a transposed tensor": lambda x, device: (
            torch.empty(x.shape[::-1], dtype=dtype, device=device).t().copy_(x)
        ),
        "copy_ into gaps": lambda x, device: _into_gaps(x, device, dtype),
    }
    name = [*strided][turn % 2]
    return {
        "to(device, dtype)": lambda x, device: x.to(device, dtype),
        "copy_": lambda x, device: torch.empty(x.shape, dtype=dtype, device=device).copy_(x),
        name: strided[name],
    }


def assert_casts_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that copies that convert agree with the CPU's conversion, between any two of devices and host."""
    count, wrong = 0, Found()
    for number, (dtype, other) in enumerate(_CASTS):
        layout = (number + seed) % 3
        data = significands((6, 7), dtype, seed)
        if dtype == torch.int64 and other == torch.int32:
            data = data >> 33
        expected = data.to(other)
        at = {place: _laid_out(data, layout, place) for place in (_HOST, *devices)}
        for turn, (source, target) in enumerate(_pairs(devices), number + seed):
            for name, call in _casting(other, turn).items():
                case = f"{name} of {_WORDS[layout]}{name_of(dtype)} to {name_of(other)} from {source} to {target}"
                if what := _arrived(call, at[source], target, expected, kept=name in _PRESERVING):
                    wrong.append(((source, target), case, what))
                count += 1
    if wrong:
        raise _names(wrong, devices, count)


def assert_pinned_copies_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that copies from and to pinned memory keep every bit, also if the device uses them without a wait."""
    count, wrong = 0, Found()
    for elements in (1, 1000, (1 << 14) + 1, (1 << 18) + 1):
        data = anything(elements, torch.float32, seed)
        pinned = data.pin_memory()
        for device in devices:
            for what, text in _pinned(data, pinned, device):
                count += 1
                if text:
                    wrong.append(((_HOST, device), f"{what}, {elements} elements of float32", text))
    if wrong:
        raise _names(wrong, devices, count)


def _pinned(data: torch.Tensor, pinned: torch.Tensor, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the name of each step with a description of its error, or ""."""
    yield (
        "pin_memory",
        "" if pinned.is_pinned() and not data.is_pinned() else "the copy is not pinned, or its source is",
    )
    yield "pin_memory", difference(pinned, data, "bits")
    there = pinned.to(device, non_blocking=True)
    # Without a wait: work that is queued behind the copy must see the data.
    yield "a clone right after an upload from pinned memory", difference(there.clone(), data, "bits")
    back = torch.empty_like(data, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    yield "a download to pinned memory, after its stream was waited for", difference(back, data, "bits")
    again = there.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
    yield "a download without waiting, after its event was waited for", difference(again, data, "bits")
