"""`settings.resolve`: precedence, origins, errors; without pytest."""

from __future__ import annotations

import pytest

from mgpu_check.settings import resolve, unknown_variables


def test_the_first_place_that_says_something_wins():
    settings = resolve(
        {"gpus": "3"}, {"MGPU_CHECK_GPUS": "2", "MGPU_CHECK_SIMULATE": "1"}, {"gpus": "x", "strict_gpus": "yes"}
    )
    assert (settings.gpus, settings.simulate, settings.strict_gpus) == (3, "cpu", True)
    assert {name: origin for name, origin in settings.origins.items() if origin != "default"} == {
        "gpus": "--gpus",
        "simulate": "environment variable MGPU_CHECK_SIMULATE",
        "strict_gpus": "strict_gpus in the ini file",
    }


def test_all_is_counted_later():
    settings = resolve({"gpus": "all"}, {}, {})
    assert settings.gpus is None
    assert settings.asked
    assert settings.counted(8).gpus == 8


@pytest.mark.parametrize(
    ("name", "texts", "remedy"),
    [
        ("gpus", ("0", "-1", "four", "1.5", ""), "choose a whole number.*'all'"),
        ("simulate", ("cuda", "gpu"), "choose 'cpu', or.*cuda:0"),
        ("rank_timeout", ("nan", "-1", "0"), "choose a number of seconds above 0"),
        ("strict_gpus", ("maybe",), "choose"),
        ("gpu_annotations", ("gitlab",), "choose"),
        ("gpu_keep_warm", ("-1",), "choose"),
        ("gpu_report", ("report.txt", "out", "", "out.md.html"), "choose a file.*ends in .md"),
    ],
)
def test_errors_name_origin_value_and_valid_set(name, texts, remedy):
    variable = f"MGPU_CHECK_{name.upper()}"
    for text in texts:
        with pytest.raises(ValueError, match=f"environment variable {variable}: '{text}' is not valid; {remedy}"):
            resolve({}, {variable: text}, {})


def test_a_simulated_node_needs_a_number_of_devices():
    with pytest.raises(ValueError, match=r"--simulate: say how many devices to simulate.*--gpus=4 --simulate"):
        resolve({"simulate": "cpu"}, {}, {})
    with pytest.raises(ValueError, match=r"--gpus: 'all' has no meaning on a simulated node.*--gpus=4"):
        resolve({"simulate": "cpu", "gpus": "all"}, {}, {})


@pytest.mark.parametrize(("text", "seconds"), [("true", 300.0), ("0", 0.0), ("2.5", 2.5), ("no", None), ("", None)])
def test_imports_are_kept_for_a_time(text, seconds):
    assert resolve({}, {}, {"gpu_keep_warm": text}).gpu_keep_warm == seconds


def test_unknown_variables_are_named():
    (line,) = unknown_variables({"MGPU_CHECK_RANKTIMEOUT": "3", "MGPU_CHECK_GPUS": "2", "OTHER": "1"})
    assert "MGPU_CHECK_RANKTIMEOUT is unknown" in line
    assert "did you mean MGPU_CHECK_RANK_TIMEOUT?" in line
