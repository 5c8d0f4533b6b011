"""Assert that operands on different devices are refused by an error that names both devices."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from mgpu_check.errors import DeviceMismatch
from mgpu_check.torch_hooks.tensors import indices_of

Device = torch.device | str

_NAMES = re.compile(r"(?<![\w.])(cpu|cuda:\d+)(?![\w:])")
# Messages of torch that do not name both devices. Convolution: types of tensors, without an index.
_TYPE = r"type \(torch\.(cuda\.)?\w+Tensor\)"
_TYPES = re.compile(rf"Input {_TYPE} and (?:weight|bias) {_TYPE} should be the same")
# cuDNN's own check: the indices only.
_INDICES = re.compile(r"to have the same device as tensor for .*; but device (\d+) does not equal (\d+)")
# Indexing: the device of the indexed tensor only.
_INDEXED = re.compile(r"indices should be either on cpu or on the same device as the indexed tensor \((cpu|cuda:\d+)\)")


def devices_named(message: str) -> set[str]:
    """Return the devices that an error message of torch names: "cpu", "cuda:1", or "cuda" without an index.

    It reads device names, the types of tensors in a convolution's message, and the bare indices in cuDNN's message.
    From the message about a misplaced index it returns the device of the indexed tensor only, because "cpu" there is a
    permitted device.
    """
    if indexed := _INDEXED.search(message):
        return {indexed[1]}
    if types := _TYPES.search(message):
        return {"cuda" if gpu_index else "cpu" for gpu_index in types.groups()}
    if indices := _INDICES.search(message):
        return {f"cuda:{index}" for index in indices.groups()}
    return set(_NAMES.findall(message))


@contextlib.contextmanager
def raises_device_mismatch(first: Device, second: Device) -> Iterator[None]:
    """Assert that the block raises torch's error for operands on two devices, and that it names both.

    ::

        with raises_device_mismatch("cuda:0", "cpu"):
            net(batch)

    Two of torch's messages do not name both devices, and are accepted if they fit them: a convolution names the types
    of its tensors (``torch.cuda.FloatTensor`` and ``torch.FloatTensor``), and the message about an index on the wrong
    device names the device of the indexed tensor only.

    Args:
        first: one device; "cuda" stands for any GPU.
        second: the other device, in any order.

    Raises:
        DeviceMismatch: the block raised nothing, or no RuntimeError, or its message does not name both devices.
        ValueError: the devices are the same.
    """
    __tracebackhide__ = True
    pair = (torch.device(first), torch.device(second))
    if pair[0] == pair[1]:
        raise ValueError(f"raises_device_mismatch: {first!r} and {second!r} are one device; give two different ones")
    with refusal(pair, ("both", "types", "indexed")):
        yield


@contextlib.contextmanager
def refusal(
    pair: tuple[torch.device, torch.device], allowed_names: tuple[str, ...], operator: str = ""
) -> Iterator[None]:
    """Assert that the block raises torch's error for operands on the devices of `pair`.

    Args:
        allowed_names: what the error may name: "both" devices, the "types" of tensors, the "indexed" tensor's device.
        operator: the operator of the block, for the message.
    """
    __tracebackhide__ = True
    subject = f"{operator or 'the block'}, with operands on {pair[0]} and {pair[1]},"
    ranks = indices_of(*pair)
    try:
        yield
    except RuntimeError as error:
        missing = [str(device) for device in pair if not _is_named(device, str(error), pair, allowed_names)]
        if missing:
            raise DeviceMismatch(
                f"{subject} raised an error that does not name {' and '.join(missing)}: {error}", ranks=ranks
            ) from error
        return
    except Exception as error:
        raise DeviceMismatch(
            f"{subject} must raise RuntimeError, but raised {type(error).__name__}: {error}", ranks=ranks
        ) from error
    raise DeviceMismatch(f"{subject} must raise RuntimeError, but raised nothing", ranks=ranks)


def _is_named(
    device: torch.device, message: str, pair: tuple[torch.device, torch.device], allowed_names: tuple[str, ...]
) -> bool:
    if _INDEXED.search(message) and "indexed" in allowed_names:
        # The index is not on the CPU, so the device other than the indexed tensor's is that of the index.
        (indexed,) = devices_named(message)
        others = [operand_device for operand_device in pair if not _matches(operand_device, indexed)]
        return len(others) == 1 and others[0].type != "cpu"
    if _TYPES.search(message) and "types" in allowed_names:
        return devices_named(message) == {operand_device.type for operand_device in pair}
    return any(_matches(device, name) for name in devices_named(message) if name != "cuda")


def _matches(device: torch.device, name: str) -> bool:
    return str(device) in (name, name.partition(":")[0])
