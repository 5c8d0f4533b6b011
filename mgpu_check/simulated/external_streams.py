"""``torch.cuda.ExternalStream``: streams that another library has made, by their handle."""

from __future__ import annotations

from typing import Self

import torch

from mgpu_check.simulated.state import device_index
from mgpu_check.simulated.streams import Stream, external

__all__ = ["ExternalStream", "external_stream"]


class ExternalStream(Stream):
    """A stream that another library made; nothing is queued on it but what this process queues."""

    def __new__(cls, stream_ptr: int, device: object = None, **_: object) -> Self:
        return super().__new__(cls)

    def __init__(self, stream_ptr: int = 0, device: object = None, **given: object) -> None:
        if "stream_id" in given:  # one that is there
            return
        super().__init__(device)
        self._pointer = int(stream_ptr)

    @property
    def cuda_stream(self) -> int:
        return self._pointer


def external_stream(pointer: int, device: int | None) -> Stream:
    """Return the stream of another library with this handle; it is there until the node is left."""
    index = device_index(device)
    made = external.get((pointer, index))
    if made is None:
        made = external.setdefault((pointer, index), ExternalStream(pointer, torch.device("cuda", index)))
    return made
