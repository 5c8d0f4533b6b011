"""Provide ``torch.cuda.ExternalStream``: streams of another library, identified by their handle."""

from __future__ import annotations

from typing import Self

import torch

from mgpu_check.simulated.state import device_index
from mgpu_check.simulated.streams import Stream, external


class ExternalStream(Stream):
    """A stream of another library; it holds only work that this process queues through torch."""

    def __new__(cls, stream_ptr: int, device: object = None, **_: object) -> Self:
        return super().__new__(cls)

    def __init__(self, stream_ptr: int = 0, device: object = None, **given: object) -> None:
        if "stream_id" in given:  # an existing stream
            return
        super().__init__(device)
        self._pointer = int(stream_ptr)

    @property
    def cuda_stream(self) -> int:
        return self._pointer


def external_stream(pointer: int, device: int | None) -> Stream:
    """Return the stream of another library with this handle; it is kept until the node exits."""
    index = device_index(device)
    made = external.get((pointer, index))
    if made is None:
        made = external.setdefault((pointer, index), ExternalStream(pointer, torch.device("cuda", index)))
    return made
