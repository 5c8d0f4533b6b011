"""Run the operations of `mgpu_check.suite.devices.computing` that have a judge, on several devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.suite.common.agreement import WrongCase, named_wrong
from mgpu_check.suite.devices.computing.cases import FAMILIES, ComputeCase
from mgpu_check.suite.devices.computing.operations import OPERATIONS
from mgpu_check.suite.devices.computing.prepared import CaseUnsupported
from mgpu_check.torch_hooks import precision

_SIZE = 32


def assert_arithmetic_known(devices: Sequence[torch.device], families: Sequence[str], seed: int = 0) -> None:
    """Assert that each operation with a known result gives it on each device, in each dtype."""
    wrong: list[WrongCase] = []
    judged = 0
    for family in families:
        for operation, dtypes in FAMILIES[family].items():
            for dtype in dtypes:
                case = ComputeCase(operation, dtype, _SIZE, seed)
                found = [(device, _seen(case, device)) for device in devices]
                judged += any(seen is not None for _, seen in found)
                wrong += [
                    WrongCase(device, f"{operation} of {dtype}, {_SIZE}x{_SIZE}", seen)
                    for device, seen in found
                    if seen
                ]
    if wrong:
        raise named_wrong(wrong, devices, judged, "the known results")


def _seen(case: ComputeCase, device: torch.device) -> str | None:
    """Describe the error of a case; "" if it is right; None if the device lacks the operation or it has no judge."""
    with torch.cuda.device(device), torch.no_grad(), precision.repeatable(tf32=case.dtype == "tf32"):
        try:
            prepared = OPERATIONS[case.operation](case, device)
            if prepared.judge is None:
                return None
            evidence = prepared.judge(prepared.call())
        except CaseUnsupported:
            return None
        except Exception as error:
            return f"it raised {type(error).__name__}: {error}"
    if not evidence:
        return ""
    if "what" in evidence:
        return str(evidence["what"])
    text = f"{evidence['errors']} of {evidence.get('elements', '?')} elements"
    if evidence.get("indices"):
        expected, got = evidence["values"][0]
        text += f", the first {evidence['indices'][0]}: expected bits {expected}, got {got}"
    return text
