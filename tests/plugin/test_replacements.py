"""Replacements by fixtures in modules that ranks import reach the ranks, or a message says that they do not."""

from __future__ import annotations

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=30")

LIBRARY = """
    class Config:
        batch = 1
        def size(self):
            return self.batch

    SETTINGS = Config()
    TABLE = {"a": 1, "b": 2}

    def read():
        return "original"

    def all_of_it():
        return read(), Config.batch, SETTINGS.size(), dict(TABLE), hasattr(Config, "size")
"""

TESTS = """
    import sys, threading
    from unittest import mock
    import pytest
    import library

    ORIGINAL = ("original", 1, 1, {"a": 1, "b": 2}, True)
    BY_FIXTURE = ("replaced", 1, 8, {"a": 1, "b": 2, "c": 3}, True)

    @pytest.fixture
    def by_monkeypatch(monkeypatch):
        monkeypatch.setattr(library, "read", lambda: "replaced")
        monkeypatch.setattr(library.SETTINGS, "batch", 8, raising=False)
        monkeypatch.setitem(library.TABLE, "c", 3)
        monkeypatch.setattr(sys, "argv", ["program", "--flag"])

    @pytest.fixture
    def by_own_monkeypatch():
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(library.TABLE, "b")
            patch.setattr("library.Config.batch", 5)
            yield

    @pytest.fixture
    def by_mock():
        with mock.patch("library.read", new=lambda: "mocked"), mock.patch.dict(library.TABLE, {"d": 4}, clear=True):
            yield

    @pytest.mark.ranks(2)
    def test_before(rank):
        assert library.all_of_it() == ORIGINAL

    @pytest.mark.ranks(2)
    def test_monkeypatch(by_monkeypatch, rank):
        assert library.all_of_it() == BY_FIXTURE
        assert sys.argv == ["program", "--flag"]

    def test_run(by_monkeypatch, ranks):
        assert ranks.run(library.all_of_it) == [BY_FIXTURE] * 2

    @pytest.mark.ranks(2)
    def test_own_monkeypatch(by_own_monkeypatch, rank):
        assert library.all_of_it() == ("original", 5, 5, {"a": 1}, True)

    def test_mock(by_mock, gpus):
        assert library.all_of_it() == ("mocked", 1, 1, {"d": 4}, True)

    @pytest.mark.ranks(2)
    def test_a_mock_itself(rank, mocked):
        assert library.read() == "original"

    @pytest.fixture
    def mocked():
        with mock.patch.object(library, "read") as read:
            yield

    def test_what_cannot_travel(monkeypatch, ranks):
        monkeypatch.setattr(library, "read", threading.Lock())
        monkeypatch.setattr(library.Config, "size", lambda self: 9)
        assert ranks.run(lambda: (library.read(), library.SETTINGS.size())) == [("original", 9)] * 2

    def test_in_the_body(ranks, monkeypatch):
        monkeypatch.setattr("library.read", lambda: "in the body")
        assert ranks.run(library.read) == ["in the body"] * 2
        monkeypatch.undo()
        assert ranks.run(library.read) == ["original"] * 2

    @pytest.mark.ranks(2)
    def test_after(rank):
        assert library.all_of_it() == ORIGINAL
"""


def test_replacements_travel_or_are_told(run, pytester):
    pytester.makepyfile(library=LIBRARY, test_it=TESTS)
    result = run(*GPUS)
    result.assert_outcomes(passed=9, warnings=2)
    for line in (
        "*PytestWarning: library.read is set in the pytest process only, because its value is a mock, and its calls would "
        "not be seen here; set it in the function that runs on the ranks, such as build or step",
        "*PytestWarning: library.read is set in the pytest process only, because its value cannot be pickled: *",
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*/mgpu_check/*Warning*")  # they point at what the ranks run
