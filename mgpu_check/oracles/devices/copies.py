"""Check copies between devices and the host: all bits arrive, and no other memory changes.

Also modules and packed sequences must move between devices.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import rnn

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.known_defects import is_known
from mgpu_check.devices.observations import Observation, Subject, SubjectResult, Work
from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.agreement import WrongCase, difference, named_wrong
from mgpu_check.oracles.devices.cases import Copies
from mgpu_check.oracles.generated_data import (
    ALL,
    CHUNK,
    HOST,
    WrongBytes,
    anything,
    bytes_of_content,
    compare,
    fill,
    significands,
    tag_of,
)
from mgpu_check.torch_hooks.tensors import name_of

_GUARD = 256
_SHARE = 0.7
_CHUNKS = 6  # chunks of memory that a comparison needs in addition to the compared data


@dataclass(frozen=True)
class _Direction:
    """Source and destination of a copy; None is the host."""

    subject: Subject
    source: int | None
    destination: int | None

    def tag(self, seed: int, *, before: bool = False) -> int:
        source, destination = (HOST if end is None else end for end in (self.source, self.destination))
        return tag_of(source, destination, seed, before=before)

    def __str__(self) -> str:
        ends = ("the host" if end is None else f"cuda:{end}" for end in (self.source, self.destination))
        return " -> ".join(ends)


def examine_copies(devices: Sequence[torch.device], case: Copies) -> list[SubjectResult]:
    """Copy between all ordered pairs of `devices`; return an observation for each, by the positions of its devices."""
    pairs = itertools.permutations(range(len(devices)), 2)
    return _examine([_Direction(Subject("copy", pair), *pair) for pair in pairs], devices, case)


def examine_host_copies(devices: Sequence[torch.device], case: Copies) -> list[SubjectResult]:
    """Copy from the host to each of `devices` and back; return an observation for each way, by device position."""
    uploads = [_Direction(Subject("upload", (index,)), None, index) for index in range(len(devices))]
    downloads = [_Direction(Subject("download", (index,)), index, None) for index in range(len(devices))]
    return _examine([*uploads, *downloads], devices, case)


def _examine(ways: Sequence[_Direction], devices: Sequence[torch.device], case: Copies) -> list[SubjectResult]:
    descriptions = {}
    for way in ways:
        descriptions[way.tag(case.seed)] = f"the data of the copy {way}"
        descriptions[way.tag(case.seed, before=True)] = f"the data from before the copy {way}"
    torch.cuda.empty_cache()
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    if case.reach > free // 4:
        case = replace(case, reach=1 << max(1, free // 4).bit_length() - 1)
    largest = _largest(free, case, copies=max(1, len(devices) - 1) if case.together else 1)
    copies_by_way: dict[_Direction, list[_GuardedCopy]] = {way: [] for way in ways}
    for size in _cut(case.sizes, largest):
        for group in [list(ways)] if case.together else [[way] for way in ways]:
            copies = [_GuardedCopy(way, devices, case, size, _chunk(free)) for way in group]
            involved = {device for copy in copies for device in copy.devices}
            _synchronize(involved)
            for guarded_copy in copies:
                guarded_copy.start()
            _synchronize(involved)
            for guarded_copy in copies:
                guarded_copy.check(descriptions)
                copies_by_way[guarded_copy.way].append(guarded_copy)
    return [_observation(way, copies, case) for way, copies in copies_by_way.items()]


def _largest(free: int, case: Copies, copies: int) -> int:
    each = 2 if case.path == "strided" else 1
    needed = copies * (each + max(each, 2 if case.path == "casting" else 1)) if copies > 1 else 2
    return max(1, int(free * _SHARE - _CHUNKS * _chunk(free)) // needed - 4 * _GUARD)


def _chunk(free: int) -> int:
    return min(max(CHUNK, free // 16), 1 << 26)


def _cut(sizes: Sequence[int], largest: int) -> list[int]:
    """Return the sizes that fit, and in place of all others one that fits, with the alignment of the first of them."""
    fitting = [size for size in sizes if size <= largest]
    beyond = [size for size in sizes if size > largest]
    if beyond:
        fitting.append(max(1, largest - largest % 4096 - 4096 + beyond[0] % 4096))
    return list(dict.fromkeys(fitting))


class _GuardedCopy:
    """A copy, with the memory around its destination.
    `_examine` makes it, starts it alone or with the others of its group, and checks it, which frees its memory."""

    def __init__(self, way: _Direction, devices: Sequence[torch.device], case: Copies, size: int, chunk: int) -> None:
        self.way, self.size = way, size
        self.wrong: list[WrongBytes] = []
        self.outside = False
        self._case = case
        ends = [torch.device("cpu") if end is None else devices[end] for end in (way.source, way.destination)]
        self.devices = [device for device in ends if device.type != "cpu"]
        self._tag, self._before = way.tag(case.seed), way.tag(case.seed, before=True)
        self._step = 2 if case.path == "strided" else 1
        self._dtype = torch.int16 if case.path == "casting" else torch.uint8
        self._width = self._dtype.itemsize
        self._begin = _GUARD + case.destination + case.reach // self._width
        self._chunk = chunk
        length = self._step * size
        source = self._memory(case.reach + case.source + length, ends[0])
        self._piece = size // case.pieces if case.pieces > 1 else 0
        self._fill(source, self._tag, self._piece)
        self._source = source[case.reach + case.source :: self._step]
        memory = self._memory((self._begin + length + _GUARD) * self._width, ends[1])
        self._fill(memory, self._before)
        self._whole = memory.view(self._dtype)

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._case.pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _fill(self, memory: torch.Tensor, tag: int, piece: int = 0) -> None:
        for low, high in _windows(memory.numel(), self._case.reach):
            fill(memory[low:high], tag, low, self._chunk, piece)

    def start(self) -> None:
        """Start the copy, on its own streams if others run at the same time."""
        target = self._whole[self._begin : self._begin + self._step * self.size : self._step]
        pieces = (tensor.tensor_split(self._case.pieces) for tensor in (target, self._source))
        with contextlib.ExitStack() as streams:
            for device in self.devices if self._case.together else ():
                streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            for into, out in zip(*pieces, strict=True):
                into.copy_(out, non_blocking=self._case.pinned)

    def check(self, descriptions: Mapping[int, str]) -> None:
        """Compare the destination and the memory around it, on its device, and free it."""
        windows = _windows(self._whole.numel(), self._case.reach // self._width)
        for low, end in ((at, stop) for start, stop in windows for at in range(start, stop, self._chunk)):
            high = min(low + self._chunk, end)
            got, expected = (x.view(torch.uint8) for x in (self._whole[low:high], self._expected(low, high)))
            if (mismatch := compare(got, expected, descriptions, start=low * self._width)) is not None:
                self.wrong.append(mismatch)
                index, between = divmod(mismatch.first // self._width - self._begin, self._step)
                self.outside |= between != 0 or not 0 <= index < self.size
        del self._whole, self._source

    def _expected(self, low: int, high: int) -> torch.Tensor:
        """Return the right elements from `low` to `high` of the destination's memory."""
        device = self._whole.device
        expected = bytes_of_content(self._before, low * self._width, high * self._width, device).view(self._dtype)
        begin, end = (min(self.size, max(0, -(-(at - self._begin) // self._step))) for at in (low, high))
        if begin < end:
            start = self._case.reach + self._case.source
            first, last = start + begin * self._step, start + end * self._step
            content = bytes_of_content(self._tag, first, last, device, self._piece)
            at = self._begin + begin * self._step - low
            expected[at : at + (end - begin - 1) * self._step + 1 : self._step] = content[:: self._step]
        return expected

    @property
    def seen(self) -> str:
        earliest = self.wrong[0]
        count, total = sum(mismatch.count for mismatch in self.wrong), self.size * self._width
        if self.outside:
            around = f"in and around the destination of {total} bytes"
            return f"{count} bytes {around} are wrong, some outside: {earliest.looks}"
        at = (earliest.first // self._width - self._begin) // self._step * self._width
        return f"{count} of {total} bytes are wrong, from byte {at} on: {earliest.looks}"


def _windows(length: int, reach: int) -> list[tuple[int, int]]:
    """Return the parts of an allocation that a copy uses: behind `reach`, and as much at the start."""
    behind = length - reach
    return [(0, behind), (reach, length)] if 0 < behind < reach else [(0, length)]


def _observation(way: _Direction, copies: Sequence[_GuardedCopy], case: Copies) -> Observation:
    work = Work(bytes=sum(copy.size for copy in copies), operations=len(copies) * case.pieces)
    failures = [copy for copy in copies if copy.wrong]
    text = str(case)
    if way.subject.kind != "copy":
        text = f"{'pinned' if case.pinned else 'pageable'} memory, {text}"
    if not failures:
        return Observation("links", way.subject, "passed", case=text, work=work)
    most = max(failures, key=lambda copy: copy.size)
    evidence = dict(most.wrong[0].evidence) | {
        "size": most.size,
        "path": case.path,
        "sizes that failed": [copy.size for copy in failures],
        "sizes that passed": [copy.size for copy in copies if not copy.wrong],
    }
    return Observation("links", way.subject, "failed", most.seen, text, work, evidence)


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


_HOST = torch.device("cpu")
_MIDDLE, _ABOVE, _LARGE = (1 << 16) + 1, (1 << 20) + 1, (4 << 20) + 1
"""Bytes: just above 64 KiB, 1 MiB and 4 MiB, where drivers and libraries change their method of copying."""
_BORDERS = (1, _MIDDLE - 2, _MIDDLE, _ABOVE)

_CASTS = (
    *((torch.float32, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    *((torch.float64, torch.float32), (torch.float16, torch.float64), (torch.int64, torch.int32)),
    *((torch.int64, torch.float32), (torch.uint8, torch.int16), (torch.bool, torch.float32)),
    (torch.complex64, torch.complex128),
)


def assert_copies_whole(devices: Sequence[torch.device], seed: int = 0, *, more: bool = False) -> None:
    """Assert that copies of 1 byte, about 64 KiB and 1 MiB arrive, between all devices and from and to the host.

    Copies use a copy engine, a kernel that reads every second byte, or a kernel that converts. They run one after the
    other and all at once, with pinned and pageable memory of the host; some have 4 MiB. Memory around the destination
    must not change. With `more`, copies just below 1 MiB, and of 4 MiB, are made by every method between every two
    devices.
    """
    further = (_ABOVE - 2, _LARGE) if more else ()
    results = [
        *examine_copies(devices, Copies("engine", (*_BORDERS, *further), seed=seed)),
        *examine_copies(devices, Copies("engine", (_MIDDLE,), 3, 5, together=True, seed=seed)),
        *examine_copies(devices, Copies("strided", (_MIDDLE, *further), 1, 2, seed=seed)),
        *examine_copies(devices, Copies("casting", (_MIDDLE, *further), seed=seed)),
        *examine_host_copies(devices, Copies("engine", (1, _MIDDLE, _LARGE), pinned=True, seed=seed)),
        *examine_host_copies(devices, Copies("engine", (1, _ABOVE, *further), pinned=False, seed=seed)),
        *examine_host_copies(devices, Copies("strided", (_MIDDLE,), pinned=True, seed=seed)),
        *examine_host_copies(devices, Copies("strided", (_MIDDLE - 2,), pinned=False, seed=seed)),
    ]
    observations = [(_way(entry, devices), entry) for entry in results if isinstance(entry, Observation)]
    failures = [(way, entry) for way, entry in observations if entry.outcome == "failed"]
    if failures:
        ways, everything = dict.fromkeys(way for way, _ in failures), {way for way, _ in observations}
        lines = [f"{way}: {entry.case}: {entry.seen}" for way, entry in failures[:6]]
        count = f"{len(ways)} of {len(everything)} ways copy wrong data ({', '.join(ways)}), the others are right"
        ranks = sorted({devices[member].index for _, entry in failures for member in entry.subject.members})
        raise DeviceMismatch("\n".join([f"the copy {lines[0]}", count, *lines[1:]]), ranks=ranks)


def _way(observation: Observation, devices: Sequence[torch.device]) -> str:
    ends = [str(devices[member]) for member in observation.subject.members]
    if observation.subject.kind == "upload":
        ends.insert(0, "the host")
    elif observation.subject.kind == "download":
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
    if any(not same_bits(target[0], row) for row in target[1:]):
        raise RuntimeError("three copies of one tensor differ")
    return target[2]


def _unwaited(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = x.to(device, non_blocking=True)
    _synchronize((x.device, device))
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


def _require_none(errors: Found, devices: Sequence[torch.device], cases: int) -> None:
    """Raise an error that names the only device common to all wrong copies, or else the target of each."""
    if not errors:
        return
    common = set.intersection(*({end for end in pair if end.type == "cuda"} for pair, _, _ in errors))
    (common_device,) = common if len(common) == 1 else (None,)
    named = [
        WrongCase(common_device or (pair[1] if pair[1].type == "cuda" else pair[0]), case, message)
        for pair, case, message in errors
    ]
    raise named_wrong(named, devices, cases, "the source")


def assert_copies_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that every copying call keeps every bit of every dtype and layout, between any two of devices and host.

    Each pair and call tries a third of the dtypes, and the third changes from call to call and from pair to pair.
    Lazily conjugated and lazily negated tensors are tried with each call and pair.
    """
    count, errors = 0, Found()
    sources: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
    for turn, (source, target) in enumerate(_pairs(devices)):
        for number, (name, call) in enumerate(_CALLS.items()):
            for dtype in ALL[(turn + number) % 3 :: 3]:
                layout = (turn + number + count) % len(_WORDS)
                data = anything(120, dtype, seed).view(12, 10)
                key = source, dtype, layout
                if key not in sources:
                    sources[key] = _laid_out(data, layout, source)
                expected = data.view(sources[key].shape)
                if message := _arrived(call, sources[key], target, expected, kept=name in _PRESERVING):
                    case = f"{name} of {_WORDS[layout]}{name_of(dtype)} from {source} to {target}"
                    errors.append(((source, target), case, message))
                count += 1
    for source, target in _pairs(devices):
        for description, make, data in _lazy(seed):
            tensor = make(source)
            for name, call in _CALLS.items():
                plain = data.conj().resolve_conj() if data.is_complex() else -data
                message = _arrived(call, tensor, target, data, lost=plain)
                if message and not (message == _SIGN_LOST and _is_known(name, tensor, target)):
                    errors.append(((source, target), f"{name} of {description} from {source} to {target}", message))
                count += 1
    _require_none(errors, devices, count)


def _lazy(seed: int) -> Iterator[tuple[str, Callable[[torch.device], torch.Tensor], torch.Tensor]]:
    """Yield lazily conjugated and negated tensors: a name, a function that makes one on a device, and its values.
    The numbers are finite, because the sign of a NaN need not change."""
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
) -> str | None:
    """Describe the error of a copy; None without one. With `kept` the strides of a tensor without gaps must be kept;
    `lost` is the result if the copy drops the lazy sign of `source`."""
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
    message = difference(got, expected, "bits")
    return _SIGN_LOST if message and lost is not None and not difference(got, lost, "bits") else message


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
    count, errors = 0, Found()
    for number, (dtype, target_dtype) in enumerate(_CASTS):
        layout = (number + seed) % 3
        data = significands((6, 7), dtype, seed)
        if dtype == torch.int64 and target_dtype == torch.int32:
            data = data >> 33
        expected = data.to(target_dtype)
        at = {device: _laid_out(data, layout, device) for device in (_HOST, *devices)}
        for turn, (source, target) in enumerate(_pairs(devices), number + seed):
            for name, call in _casting(target_dtype, turn).items():
                if message := _arrived(call, at[source], target, expected, kept=name in _PRESERVING):
                    dtypes = f"{_WORDS[layout]}{name_of(dtype)} to {name_of(target_dtype)}"
                    errors.append(((source, target), f"{name} of {dtypes} from {source} to {target}", message))
                count += 1
    _require_none(errors, devices, count)


def assert_pinned_copies_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that copies from and to pinned memory keep every bit, also if the device uses them without a wait."""
    count, errors = 0, Found()
    for elements in (1, 1000, (1 << 14) + 1, (1 << 18) + 1):
        data = anything(elements, torch.float32, seed)
        pinned = data.pin_memory()
        for device in devices:
            for step, text in _pinned(data, pinned, device):
                count += 1
                if text:
                    errors.append(((_HOST, device), f"{step}, {elements} elements of float32", text))
    _require_none(errors, devices, count)


def _pinned(data: torch.Tensor, pinned: torch.Tensor, device: torch.device) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each step with a description of its error, or None."""
    is_pinned = pinned.is_pinned() and not data.is_pinned()
    yield "pin_memory", None if is_pinned else "the copy is not pinned, or its source is"
    yield "pin_memory", difference(pinned, data, "bits")
    upload = pinned.to(device, non_blocking=True)
    # Without a wait: work that is queued behind the copy must see the data.
    yield "a clone right after an upload from pinned memory", difference(upload.clone(), data, "bits")
    back = torch.empty_like(data, pin_memory=True)
    back.copy_(upload, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    yield "a download to pinned memory, after its stream was waited for", difference(back, data, "bits")
    download = upload.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
    yield "a download without waiting, after its event was waited for", difference(download, data, "bits")


class _Holding(nn.Module):
    """A module with each kind of state: parameters, a frozen and a tied one, buffers, a gradient, modes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(significands((3, 4), torch.float32, seed).clone())
        self.frozen = nn.Parameter(significands((5,), torch.bfloat16, seed).clone(), requires_grad=False)
        self.inner = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(significands((3, 2), torch.float32, seed + 1))
        self.tied = self.inner.weight
        self.register_buffer("saved", anything(7, torch.int64, seed).clone())
        self.register_buffer("unsaved", anything(9, torch.float32, seed).clone(), persistent=False)
        self.register_buffer("missing", None)
        self.trained.grad = significands((3, 4), torch.float32, seed + 2).clone()
        self.inner.eval()


_MOVES: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "Module.to": lambda module, device: module.to(device),
    "Module.cuda or cpu": lambda module, device: module.cuda(device) if device.type == "cuda" else module.cpu(),
    "Module.to, non_blocking": lambda module, device: _waited(module.to(device, non_blocking=True)),
    "Module.to, by name": lambda module, device: module.to(str(device)),
}

_TWINS: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "Module.to of a deepcopy": lambda module, device: copy.deepcopy(module).to(device),
    "deepcopy after Module.to": lambda module, device: copy.deepcopy(module.to(device)),
}
"""Moves of a deep copy, which loses the gradients of parameters (torch/nn/parameter.py, Parameter.__deepcopy__, torch
2.13)."""


def _waited(module: nn.Module) -> nn.Module:
    _synchronize(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return module


def assert_modules_move(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that a module keeps all its tensors and modes when it moves between devices and the host.

    Parameters, frozen parameters, gradients and buffers must arrive bit for bit, including buffers that are not in the
    state dict. Tied parameters must stay tied. Sequences that are packed on the host must unpack elsewhere in order.
    """
    errors: list[WrongCase] = []
    ways = [*zip([_HOST, *devices], [*devices, _HOST], strict=True), *zip(devices[1:], devices, strict=False)]
    for source, target in ways:
        messages: dict[str, str | None] = {}
        for name, move in (_MOVES | _TWINS).items():
            module, expected = _Holding(seed).to(source), _Holding(seed)
            if name in _TWINS:
                expected.zero_grad()
            messages[name] = _lost(move(module, target), expected, target)
        messages["PackedSequence.to"] = _disordered(source, target, seed)
        named = target if target.type == "cuda" else source
        errors += [
            WrongCase(named, f"{name} from {source} to {target}", text) for name, text in messages.items() if text
        ]
    if errors:
        moves = len(ways) * (len(_MOVES | _TWINS) + 1)
        raise named_wrong(errors, devices, moves, "the source")


def _disordered(source: torch.device, target: torch.device, seed: int) -> str | None:
    """Describe how sequences of unequal lengths differ that were packed on the host and moved; None if they do not."""
    lengths = torch.tensor([2, 4, 3])  # the permutation that sorts them is not its own inverse
    steps = significands((3, 4, 2), torch.float32, seed)
    packed = rnn.pack_padded_sequence(steps, lengths, True, enforce_sorted=False)
    moved: Any = packed  # the overloads of its `to` take no device first (torch/nn/utils/rnn.py, torch 2.13)
    moved = moved.to(source).to(target)
    if moved.data.device != target:
        return f"it is on {moved.data.device}"
    got, expected = (rnn.pad_packed_sequence(sequence, batch_first=True)[0] for sequence in (moved, packed))
    return difference(got, expected, "bits")


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad


def _lost(module: nn.Module, expected: nn.Module, device: torch.device) -> str | None:
    got, expected_tensors = dict(_held(module)), dict(_held(expected))
    if list(got) != list(expected_tensors):
        return f"it holds {', '.join(got)}; expected {', '.join(expected_tensors)}"
    for name, tensor in expected_tensors.items():
        if got[name].device != device:
            return f"{name} is on {got[name].device}"
        if got[name].requires_grad != tensor.requires_grad:
            return f"requires_grad of {name} is {got[name].requires_grad}"
        if message := difference(got[name].detach(), tensor.detach(), "bits"):
            return f"{name}: {message}"
    if module.tied is not module.get_submodule("inner").weight:
        return "a parameter with two names has become two"
    if module.state_dict().keys() != expected.state_dict().keys():
        return f"its state dict has {', '.join(module.state_dict())}; expected {', '.join(expected.state_dict())}"
    modes, expected_modes = ([inner.training for inner in outer.modules()] for outer in (module, expected))
    if modes != expected_modes:
        return "the training modes of its parts have changed"
    return None
