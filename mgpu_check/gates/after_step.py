"""Wait for all ranks at the end of a step, before the gate runs collectives of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from mgpu_check.engine.rank_side.pausing import pause


def after_step(number: int, steps: int, modules: Mapping[str, nn.Module]) -> None:
    """Wait for all ranks after a step, and compare their calls; see `pause`.

    Args:
        modules: modules by prefix of their parameters' names. The gate gathers their sharded gradients, which needs all
            ranks of the mesh.
    """
    pause(f"step {number + 1}", last=number + 1 == steps, held=_sharded_gradients(modules))


def _sharded_gradients(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for prefix, module in modules.items():
        for name, value in module.named_parameters():
            mesh = getattr(value.grad, "device_mesh", None)  # None without a gradient, or if it is not a DTensor
            if mesh is not None:
                yield f"gradient of {prefix}{name}", tuple(mesh.mesh.flatten().tolist())
