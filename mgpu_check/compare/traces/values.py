"""Values of tensors in a trace file, in the format safetensors: "STEP/gradient/NAME" and "STEP/parameter/NAME".

The package safetensors comes with the extra ``mgpu-check[trace]``, and is imported when values are written or read.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO, Any

INSTALL = "pip install 'mgpu-check[trace]'"
VALUES_OF_COMPARISON = 2**26
"""Most bytes of values that a comparison of two runs keeps of each, in memory."""


def installed() -> bool:
    """Return whether values can be written and read."""
    return find_spec("safetensors") is not None


def gathered(files: Sequence[IO[bytes]]) -> bytes:
    """Return the values that the ranks kept, whole, in the format safetensors.

    Incomplete tensors are left out.

    Args:
        files: for each rank the file that `mgpu_check.compare.traces.keeping` has written.
    """
    from safetensors.torch import save

    from mgpu_check.numerics.placement import Slice, assembled

    parts: dict[str, list[tuple[Slice, Any]]] = defaultdict(list)
    for file in files:
        file.seek(0)
        data, places = bytearray(file.read()), {}
        start = data.index(b"\n") + 1
        while start < len(data):
            end = data.index(b"\n", start)
            head, start = json.loads(data[start:end]), end + 1
            own, *at = head["bytes"]
            value = _tensor(data, start, own, head["dtype"])
            if at:
                places[head["name"]] = _tensor(data, start + own, at[0], "int64")
            start += own + sum(at)
            part = Slice(head["name"], tuple(head["shape"]), places.get(head["name"]))
            parts[f"{head['step']}/{head['kind']}/{head['name']}"].append((part, value))
    found = {name: assembled(some) for name, some in parts.items()}
    return bytes(save({name: one.value for name, one in found.items() if one.missing is None}))


def _tensor(data: bytearray, start: int, size: int, dtype: str) -> Any:
    import torch

    if not size:
        return torch.empty(0, dtype=getattr(torch, dtype))
    # Cloned, because a view as another dtype must be aligned.
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).clone().view(getattr(torch, dtype))


def described(values: tuple[bytes | None, bytes | None], names: tuple[str, str], tolerance: float) -> str:
    """Describe the elements of a tensor that differ between two runs; "" if a run has no values of it.

    Args:
        values: of both runs, in the format safetensors.
        names: the name of the tensor in both.
        tolerance: relative to the root mean square of the first tensor.
    """
    if None in values or not installed():
        return ""
    import torch
    from safetensors.torch import load

    from mgpu_check.numerics.placement import Slice

    one, other = (load(data).get(name) for data, name in zip(values, names, strict=True) if data is not None)
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return ""
    shape = tuple(one.shape)
    one, other = one.double().reshape(-1), other.double().reshape(-1)
    apart = (other - one).abs()
    off = (~(apart <= tolerance * float(one.norm()) / math.sqrt(one.numel()))).nonzero().flatten()
    if not len(off):
        return ""
    # Scattered elements are counted, not listed.
    where = str(Slice("", shape, off))
    worst = int(apart.nan_to_num(math.inf).argmax())
    index = list(map(int, torch.unravel_index(torch.tensor(worst), shape))) if shape else []
    return (
        f"{len(off)} of {one.numel()} elements differ{f' ({where})' if where.startswith('dim') else ''}, the largest "
        f"difference is at {index}: {float(other[worst]):.7g} instead of {float(one[worst]):.7g}"
    )
