"""Right programs: steps that train the same model on any number of ranks as on one device, in the ways that people do.

`gate.py` measures false alarms and flipped bits on them. Each has the arguments of `assert_step_scales`, and needs no
GPU.
"""

from __future__ import annotations

from programs import by_hand, wrapped
from programs.setting import PROGRAMS, Program, planting, shard

__all__ = ["PROGRAMS", "Program", "by_hand", "planting", "shard", "wrapped"]
