"""`mgpu-check devices`: list the GPUs that torch sees on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mgpu_check.cli.codes import Parser


def main(argv: Sequence[str]) -> int:
    """Print the visible devices, and the variable that selects them. Return 0, also without devices; 4 if the driver or
    the devices do not work."""
    parser = Parser(prog="mgpu-check devices", description="List the GPUs that torch sees on this machine.")
    parser.parse_args(argv)
    import torch

    from mgpu_check.devices.inventory import take_inventory

    cuda = torch.version.cuda or "none (a CPU build)"
    print(f"torch {torch.__version__}, built for CUDA {cuda}")
    inventory = take_inventory()
    masked = os.environ.get(inventory.mask)
    if masked is not None:
        print(f"{inventory.mask}={masked!r}")
    if inventory.trouble:
        print(inventory.trouble)
        return 4
    if not inventory.devices:
        print("no GPU is visible; to simulate some: mgpu-check --gpus=4 --simulate")
        return 0
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        print("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    for device in inventory.devices:
        capability, memory = ".".join(map(str, device.capability)), f"{device.memory / 2**30:.1f} GiB"
        print(f"cuda:{device.index}  {device.name}  {memory}  compute {capability}  {device.uuid}")
    return 0
