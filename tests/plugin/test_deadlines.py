"""Only the deadline that Hypothesis has set itself is removed from a test on ranks."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.plugin.execution import _settings_for_ranks


def deadline_on_ranks(chosen: settings) -> float | None:
    @chosen
    @given(n=st.integers())
    def test(n: int) -> None: ...

    with _settings_for_ranks(SimpleNamespace(function=test)):  # type: ignore[arg-type]
        deadline: datetime.timedelta | None = test._hypothesis_internal_use_settings.deadline  # type: ignore[attr-defined]
    return None if deadline is None else deadline.total_seconds() * 1000


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(settings, "_profiles", dict(settings._profiles))
    return settings


@pytest.mark.parametrize("chosen", [200, 201, datetime.timedelta(milliseconds=200), None])
def test_the_deadline_of_a_user_stays(chosen: Any) -> None:
    expected = None if chosen is None else 201 if chosen == 201 else 200
    assert deadline_on_ranks(settings(deadline=chosen)) == expected
    assert deadline_on_ranks(settings(settings(deadline=chosen), max_examples=3)) == expected


@pytest.mark.parametrize("name", ["ours", "default"])
def test_the_deadline_of_a_profile_of_a_user_stays(profiles: Any, name: str) -> None:
    original = settings.get_profile("default")
    profiles.register_profile(name, original, deadline=200)
    assert deadline_on_ranks(settings(settings.get_profile(name), max_examples=3)) == 200
    assert deadline_on_ranks(settings(original, max_examples=3)) is None
