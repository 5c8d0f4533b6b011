"""The reports of launched ranks, and the devices that they see."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.errors import CheckFailure
from mgpu_check.suite.launch.launching import Launched, assert_trained, launched, seeing, speed_of


def run(world: int, **changed: Any) -> Launched:
    told = [
        {
            "rank": rank,
            "world_size": world,
            "device": f"cuda:{rank}",
            "current_device": rank,
            "environment": {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            | {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
            | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(world)}
            | {"TORCHELASTIC_RESTART_COUNT": "0"},
            "losses": [1.0, 0.4],
            "seconds": [9.0, 2.0 / world, 2.0 / world],
            "parameters": "a",
        }
        for rank in range(world)
    ]
    told[-1] |= changed
    return Launched(tuple(told))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "cuda:0"}, "rank 1 of 2: device is 'cuda:0', expected 'cuda:1'"),
        ({"parameters": "b"}, "rank 1 ended with different parameters than rank 0: b, rank 0 a"),
        ({"losses": [1.0, 0.3]}, "rank 1 ended with different losses"),
    ],
)
def test_wrong_ranks_are_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckFailure, match=words) as caught:
        assert_trained("torchrun", [run(1), run(2, **changed)])
    assert caught.value.ranks == (1,)


def test_losses_are_those_of_one_device_and_fall() -> None:
    assert_trained("torchrun", [run(1), run(2)])
    with pytest.raises(CheckFailure, match=r"the loss of epoch 1 is 0.4 on 2 ranks, but 0.3 on 1"):
        assert_trained("torchrun", [run(1, losses=[1.0, 0.3]), run(2)])
    with pytest.raises(CheckFailure, match="the loss does not fall below half its start"):
        assert_trained("torchrun", [run(1, losses=[1.0, 0.9])])


def test_speed_is_claimed_for_real_devices_only() -> None:
    runs = [run(1), run(4)]
    assert speed_of(runs, simulated=False).endswith("4.00 times as fast, efficiency 100%")
    assert "times as fast" not in speed_of(runs, simulated=True)


@pytest.mark.parametrize(("listed", "seen"), [("5,1,3", "5,1"), (None, "0,1")])
def test_launched_ranks_see_the_devices_of_the_run(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert seeing(2, simulated=False)["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("way", ["torchrun", "spawn"])
def test_what_is_launched_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str) -> None:
    """Logs of torchrun's agent, which it makes in the directory for temporary files, stay there otherwise."""

    def run_here(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        tempfile.mkdtemp(prefix="torchelastic_", dir=env["TMPDIR"])
        for word in json.loads(command[-1])[0][1] if way == "torchrun" else command:
            if word.startswith("--report="):
                Path(word.partition("=")[2], "rank0.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run_here)
    assert launched(way, [1], [], simulated=True) == [Launched(({},))]
    assert list(tmp_path.iterdir()) == []
