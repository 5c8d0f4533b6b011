"""Right programs: steps that train the same model on any number of ranks as on one device, in the ways that people do.

What `gate.py` measures false alarms and flipped bits on. Each is what `assert_step_scales` takes; nothing here needs a
GPU.
"""

from __future__ import annotations

from programs import by_hand, wrapped
from programs.setting import PROGRAMS, Program, planting, shard

__all__ = ["PROGRAMS", "Program", "by_hand", "planting", "shard", "wrapped"]
