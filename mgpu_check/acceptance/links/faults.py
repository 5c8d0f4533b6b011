"""Defects of copies."""

from __future__ import annotations

from typing import Any

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, host_link, link, made_by
from mgpu_check.simulated.defects.parameters import Parameters


def _link(
    name: str, summary: str, defaults: Parameters, cls: str = "Link", level: str = "quick", **arguments: Any
) -> None:
    parameters = {"device": 0, "peer": 2, "above": 0, **defaults}
    hardware_fault(HardwareFault(name, summary, parameters, link, ("links",), level, made_by(cls, **arguments)))


def _host_link(name: str, summary: str, defaults: Parameters, **arguments: Any) -> None:
    parameters = {"device": 1, "above": 0, "memory": "any", **defaults}
    hardware_fault(
        HardwareFault(name, summary, parameters, host_link, ("links",), defect=made_by("HostLink", **arguments))
    )


_link("copy-zeros", "copies over a link deliver zeros", {})
_link("copy-stale", "copies over a link leave the old content", {}, "Stale")
_link("copy-of-another-peer", "copies over a link deliver the data of another peer", {}, "AnotherPeer")
_link("copy-offset", "copies over a link arrive 64 bytes too far", {}, what="offset")
_link("copy-tail", "copies over a link have a wrong end", {}, what="tail")
_link("copy-large", "copies over a link lose their second half above 2 MiB", {"above": 2 << 20}, what="half")
_link("copy-by-kernel", "only kernels that write to the peer's memory write zeros", {"path": "kernel"})
_link("copy-by-engine", "only the copy engine delivers zeros", {"path": "engine"})
_link("copy-under-load", "copies over a link have a wrong bit if other copies run", {"load": 1, "seed": 0}, what="bit")
_link("copy-lanes", "copies over a link have a wrong bit in each 32nd word", {"seed": 0}, what="lane")
_link("copy-seldom", "one copy in 20 over a link has a wrong bit", {"every": 20, "seed": 0}, what="bit")
_link("copy-stale-seldom", "one copy in 50 over a link leaves the old content", {"every": 50}, "Stale")
_link("copy-stale-rare", "one copy in 500 over a link leaves the old content", {"every": 500}, "Stale", "standard")
_link("copy-wraps", "copies over a link arrive 2 MiB in front of their place", {"reach": 2 << 20}, "Wrapping")
hardware_fault(
    HardwareFault(
        "copy-out",
        "copies from a GPU to any other have a wrong end",
        {"device": 1, "above": 0},
        gpu,
        ("links",),
        defect=made_by("Egress", what="tail"),
    )
)
_host_link("upload-truncated", "copies from the host lose their second half", {}, what="half", upload=True)
_host_link("download-truncated", "copies to the host lose their second half", {}, what="half", download=True)
_host_link(
    "upload-seldom",
    "one copy in 50 from pinned memory loses its second half",
    {"memory": "pinned", "every": 50},
    what="half",
    upload=True,
)
_host_link(
    "download-seldom",
    "one copy in 50 to pinned memory has a wrong bit",
    {"memory": "pinned", "every": 50, "seed": 0},
    what="bit",
    download=True,
)
_host_link(
    "upload-pinned",
    "copies from pinned memory have a wrong bit",
    {"memory": "pinned", "seed": 0},
    what="bit",
    upload=True,
)
_host_link(
    "download-pageable",
    "copies to pageable memory have a wrong bit",
    {"memory": "pageable", "seed": 0},
    what="bit",
    download=True,
)
