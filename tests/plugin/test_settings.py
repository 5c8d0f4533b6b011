"""`settings.resolve`: precedence, origins, errors; without pytest."""

from __future__ import annotations

import pytest

from mgpu_check.settings import resolve, unknown_variables


def test_defaults():
    settings = resolve({}, {}, {})
    assert (settings.gpus, settings.simulate, settings.rank_timeout, settings.strict_gpus) == (0, None, 60.0, False)
    assert set(settings.origins.values()) == {"default"}


def test_the_first_place_that_says_something_wins():
    settings = resolve(
        {"gpus": "3"}, {"MGPU_CHECK_GPUS": "2", "MGPU_CHECK_SIMULATE": "1"}, {"gpus": "x", "strict_gpus": "yes"}
    )
    assert (settings.gpus, settings.simulate, settings.strict_gpus) == (3, "cpu", True)
    assert settings.origins == {
        "gpus": "--gpus",
        "simulate": "environment variable MGPU_CHECK_SIMULATE",
        "rank_timeout": "default",
        "strict_gpus": "strict_gpus in the ini file",
        "agent_timeout": "default",
        "agent_key_file": "default",
        "trust_network": "default",
        "gpu_keep_warm": "default",
        "gpu_report": "default",
        "gpu_annotations": "default",
        "gpu_level": "default",
        "adapt_torch_tests": "default",
        "accept_for": "default",
        "accept_memory": "default",
        "accept_baseline": "default",
        "accept_record_baseline": "default",
        "accept_report": "default",
        "accept_evidence": "default",
        "accept_policy": "default",
        "accept_dcgm": "default",
        "accept_verdict_file": "default",
        "accept_plant": "default",
    }


def test_all_is_counted_later():
    settings = resolve({"gpus": "all"}, {}, {})
    assert settings.gpus is None
    assert settings.asked
    assert settings.counted(8).gpus == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpus", "0"),
        ("gpus", "four"),
        ("simulate", "cuda"),
        ("rank_timeout", "nan"),
        ("rank_timeout", "-1"),
        ("strict_gpus", "maybe"),
        ("gpu_annotations", "gitlab"),
        ("gpu_keep_warm", "-1"),
        ("gpu_report", "report.txt"),
    ],
)
def test_errors_name_origin_value_and_valid_set(name, text):
    with pytest.raises(
        ValueError, match=rf"environment variable MGPU_CHECK_{name.upper()}: '{text}' is not valid; choose"
    ):
        resolve({}, {f"MGPU_CHECK_{name.upper()}": text}, {})


@pytest.mark.parametrize(("text", "seconds"), [("true", 300.0), ("0", 0.0), ("2.5", 2.5), ("no", None), ("", None)])
def test_imports_are_kept_for_a_time(text, seconds):
    assert resolve({}, {}, {"gpu_keep_warm": text}).gpu_keep_warm == seconds


def test_unknown_variables_are_named():
    (line,) = unknown_variables({"MGPU_CHECK_RANKTIMEOUT": "3", "MGPU_CHECK_GPUS": "2", "OTHER": "1"})
    assert "MGPU_CHECK_RANKTIMEOUT is unknown" in line
    assert "did you mean MGPU_CHECK_RANK_TIMEOUT?" in line
