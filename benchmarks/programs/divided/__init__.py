"""Programs whose model is divided among ranks, drawn at random, and mistakes to plant in them."""

from __future__ import annotations

from programs.divided.drawing import WAYS, Draw, Plant, drawn, planted
from programs.divided.steps import arguments_of

__all__ = ["WAYS", "Draw", "Plant", "arguments_of", "drawn", "planted"]
