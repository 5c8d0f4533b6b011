"""Defects of speed."""

from __future__ import annotations

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, host_link, link, made_by

__all__: list[str] = []

hardware_fault(
    HardwareFault(
        "slow-gpu",
        "a GPU computes slowly",
        {"device": 1, "factor": 2.0},
        gpu,
        ("performance",),
        defect=made_by("speed", "SlowDevice"),
    )
)
hardware_fault(
    HardwareFault(
        "slow-when-hot",
        "a GPU that has been busy for some time slows down",
        {"device": 1, "factor": 1.6, "heat": 1e-3},
        gpu,
        ("performance",),
        defect=made_by("speed", "SlowDevice"),
    )
)
hardware_fault(
    HardwareFault(
        "slow-dtype",
        "a GPU computes slowly in one dtype",
        {"device": 1, "factor": 8.0, "dtype": "float16"},
        gpu,
        ("performance",),
        defect=made_by("speed", "SlowDevice"),
    )
)
hardware_fault(
    HardwareFault(
        "slow-link",
        "copies over a link are slow",
        {"device": 0, "peer": 2, "factor": 4.0},
        link,
        ("performance",),
        defect=made_by("speed", "SlowLink"),
    )
)
hardware_fault(
    HardwareFault(
        "slow-host-link",
        "copies between the host and a GPU are slow",
        {"device": 1, "factor": 4.0},
        host_link,
        ("performance",),
        defect=made_by("speed", "SlowHostLink"),
    )
)
hardware_fault(
    HardwareFault(
        "lost",
        "a GPU falls off the bus, `after` seconds into the run",
        {"device": 1, "after": 0.0},
        gpu,
        ("inventory", "memory", "compute", "links", "collectives", "training"),
        defect=made_by("speed", "Lost"),
    )
)
hardware_fault(
    HardwareFault(
        "hangs",
        "a call of the driver about a GPU never returns",
        {"device": 1, "after": 0.0},
        gpu,
        ("inventory", "memory", "compute", "links", "collectives", "training"),
        defect=made_by("speed", "Hanging"),
    )
)
