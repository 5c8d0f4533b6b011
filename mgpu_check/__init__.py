"""mgpu-check: is multi-GPU PyTorch code, and the machine under it, correct?

The names below are imported when they are first used: importing this package imports neither torch nor Hypothesis.

(For pytest, which rewrites the assertions of plugins, and warns of those that it finds imported: PYTEST_DONT_REWRITE.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgpu_check.asserts.collectives import assert_allreduce_matches as assert_allreduce_matches
    from mgpu_check.asserts.collectives import assert_shards_cover as assert_shards_cover
    from mgpu_check.asserts.mismatch import raises_device_mismatch as raises_device_mismatch
    from mgpu_check.asserts.models import assert_gradients_agree as assert_gradients_agree
    from mgpu_check.asserts.models import assert_replicas_agree as assert_replicas_agree
    from mgpu_check.compare.gate import assert_script_scales as assert_script_scales
    from mgpu_check.engine.rank_side.rank import Rank as Rank
    from mgpu_check.engine.rank_side.rank import current_rank as current_rank
    from mgpu_check.errors import NotCompared as NotCompared
    from mgpu_check.errors import RankDied as RankDied
    from mgpu_check.errors import RankFailure as RankFailure
    from mgpu_check.errors import RankHang as RankHang
    from mgpu_check.errors import ScalingMismatch as ScalingMismatch
    from mgpu_check.gates.agreement_gate import Configuration as Configuration
    from mgpu_check.gates.agreement_gate import assert_steps_agree as assert_steps_agree
    from mgpu_check.gates.bitwise_gate import assert_bitwise as assert_bitwise
    from mgpu_check.gates.checkpoint_gate import assert_resume_continues as assert_resume_continues
    from mgpu_check.gates.configuration_space import assert_configurations_agree as assert_configurations_agree
    from mgpu_check.gates.engines_gate import assert_engines_agree as assert_engines_agree
    from mgpu_check.gates.evaluation_gate import assert_evaluation_agrees as assert_evaluation_agrees
    from mgpu_check.gates.loader_gate import assert_loader_covers as assert_loader_covers
    from mgpu_check.gates.step_gate import assert_metric_scales as assert_metric_scales
    from mgpu_check.gates.step_gate import assert_step_scales as assert_step_scales
    from mgpu_check.gates.survival_gate import assert_survives as assert_survives
    from mgpu_check.plugin.harnesses import adapt as adapt
    from mgpu_check.plugin.ranks import Ranks as Ranks
    from mgpu_check.simulated import simulated_node as simulated_node

_HOMES = {
    **dict.fromkeys(("assert_allreduce_matches", "assert_shards_cover"), "mgpu_check.asserts.collectives"),
    "raises_device_mismatch": "mgpu_check.asserts.mismatch",
    **dict.fromkeys(("assert_gradients_agree", "assert_replicas_agree"), "mgpu_check.asserts.models"),
    "assert_script_scales": "mgpu_check.compare.gate",
    **dict.fromkeys(("Rank", "current_rank"), "mgpu_check.engine.rank_side.rank"),
    **dict.fromkeys(("NotCompared", "RankDied", "RankFailure", "RankHang", "ScalingMismatch"), "mgpu_check.errors"),
    **dict.fromkeys(("Configuration", "assert_steps_agree"), "mgpu_check.gates.agreement_gate"),
    "assert_bitwise": "mgpu_check.gates.bitwise_gate",
    "assert_resume_continues": "mgpu_check.gates.checkpoint_gate",
    "assert_configurations_agree": "mgpu_check.gates.configuration_space",
    "assert_engines_agree": "mgpu_check.gates.engines_gate",
    "assert_evaluation_agrees": "mgpu_check.gates.evaluation_gate",
    "assert_loader_covers": "mgpu_check.gates.loader_gate",
    **dict.fromkeys(("assert_metric_scales", "assert_step_scales"), "mgpu_check.gates.step_gate"),
    "assert_survives": "mgpu_check.gates.survival_gate",
    "adapt": "mgpu_check.plugin.harnesses",
    "Ranks": "mgpu_check.plugin.ranks",
    "simulated_node": "mgpu_check.simulated",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
