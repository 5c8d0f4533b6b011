"""Logging on ranks: levels and formats of pytest, a section for each rank, and records for `caplog`."""

from __future__ import annotations

import pytest

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=30")

TESTS = """
    import logging, time
    import pytest
    import torch.distributed as dist

    log = logging.getLogger("train")

    @pytest.mark.ranks(2)
    def test_failure(rank):
        log.info("loss %s", rank.index, extra={"object": object()})
        log.debug("not at this level")
        assert False

    @pytest.mark.ranks(2, timeout=1)
    def test_hang(rank):
        log.info("before")
        if rank.index:
            time.sleep(100)
        dist.barrier()

    def test_caplog(ranks, caplog):
        def body(rank):
            log.debug("in %s", rank.index)
            try:
                raise KeyError(rank.index)
            except KeyError:
                log.exception("failed")

        ranks.run(body)
        assert not [record for record in caplog.records if record.levelname == "DEBUG"]
        caplog.clear()
        with caplog.at_level("DEBUG", "train"):
            ranks.run(body)
        records = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
        assert records == [
            (*("train", "DEBUG"), "in 0"), (*("train", "ERROR"), "failed"),
            (*("train", "DEBUG"), "in 1"), (*("train", "ERROR"), "failed"),
        ]
        assert "KeyError: 0" in caplog.records[1].exc_text and caplog.records[0].funcName == "body"

    @pytest.mark.ranks(2)
    def test_afterwards(rank):
        assert log.level == logging.NOTSET and len(logging.getLogger().handlers) == 2
        log.warning("of a test that passes")
"""


def test_logs_of_ranks(run, pytester):
    pytester.makepyfile(TESTS)
    result = run(*GPUS, "--log-level=INFO", "--log-format=%(levelname)s %(message)s")
    result.assert_outcomes(passed=2, failed=2)
    for rank in (0, 1):
        result.stdout.fnmatch_lines(
            [
                *(f"-* Captured log of rank {rank} of 2 call -*", f"INFO loss {rank}"),
                *(f"-* Captured log of rank {rank} of 2 call -*", "INFO before"),
            ]
        )
    for line in ("*INFO not at this level*", "*WARNING of a test that passes*", "*Captured stderr*"):
        result.stdout.no_fnmatch_line(line)


@pytest.mark.slow
def test_the_level_of_an_ini_file_and_a_run_without_the_plugin(run, pytester):
    pytester.makeini("[pytest]\nlog_level = DEBUG")
    pytester.makepyfile(TESTS)
    run(*GPUS, "-k", "failure").stdout.fnmatch_lines(["DEBUG * not at this level"])
    pytester.makeini("[pytest]")
    run(*GPUS, "-k", "failure", "-p", "no:logging").stdout.no_fnmatch_line("*Captured log*")
