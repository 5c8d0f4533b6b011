"""Open the store for the rendezvous of a world's ranks."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

import torch.distributed as dist


def open_store(address: str, size: int) -> Any:
    """Open the store at `address`: ``file:///path``, or ``tcp://host:port/prefix`` of a running store."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "file":
        return dist.FileStore(os.fsdecode(urllib.parse.unquote_to_bytes(parts.path)), size)  # type: ignore[attr-defined]  # not in its __all__
    assert parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None, address
    stores: Any = dist  # the stores are not in its __all__
    store = stores.TCPStore(parts.hostname, parts.port, is_master=False, wait_for_workers=False)
    return stores.PrefixStore(parts.path.strip("/"), store)
