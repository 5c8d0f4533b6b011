"""Open the store for the rendezvous of a world's ranks, and let the groups of a rank share a thread for connections."""

from __future__ import annotations

import functools
import os
import urllib.parse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.torch_hooks.patches import Patches

_CHOOSE_DEVICES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
"""Variables that choose the devices of gloo for the next groups of a program."""

own_gloo_devices: list[int] = []
"""The process, once for each of its groups with a device of its own, which listens at a port."""


def open_store(address: str, size: int) -> Any:
    """Open the store at `address`: ``file:///path``, or ``tcp://host:port/prefix`` of a running store."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "file":
        return dist.FileStore(os.fsdecode(urllib.parse.unquote_to_bytes(parts.path)), size)  # type: ignore[attr-defined]  # not in its __all__
    assert parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None, address
    stores: Any = dist  # the stores are not in its __all__
    store = stores.TCPStore(parts.hostname, parts.port, is_master=False, wait_for_workers=False)
    return stores.PrefixStore(parts.path.strip("/"), store)


def share_gloo_device() -> None:
    """Make the gloo groups of this process share one device of gloo, unless a program chooses the devices itself.

    By default each group has a device of its own, whose thread wakes up 100 times a second as long as the group lives.
    A test whose cases build meshes has hundreds of groups at its end.
    """
    gloo: Any = getattr(torch._C._distributed_c10d, "ProcessGroupGloo", None)
    if not all(hasattr(gloo, name) for name in ("create_default_device", "_Options")):
        return
    # A forked process inherits the device, but not its thread.
    device = functools.cache(lambda process: gloo.create_default_device())

    def sharing(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def shared(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            # torch 2.14 also passes `enable_reconfigure`, by name.
            named = {"timeout": args[0]} | kwargs if len(args) == 1 else kwargs
            known = isinstance(named.get("timeout"), timedelta) and {*named} <= {"timeout", "enable_reconfigure"}
            if len(args) > 1 or not known or any(map(os.environ.get, _CHOOSE_DEVICES)):
                own_gloo_devices.append(os.getpid())
                init(self, store, rank, size, *args, **kwargs)
                return
            options = gloo._Options()
            options._devices, options._timeout = [device(os.getpid())], named["timeout"]
            if "enable_reconfigure" in named:
                options.enable_reconfigure = named["enable_reconfigure"]
            init(self, store, rank, size, options)

        return shared

    Patches().wrap(gloo, "__init__", sharing)
