"""Register further plugins, as the options ask for them."""

from __future__ import annotations

import pytest

from mgpu_check.annotations import wanted
from mgpu_check.plugin.session import GpuSession


def register(config: pytest.Config, session: GpuSession) -> None:
    """Register the summary, annotations, the early start of ranks, and the line that repeats an example.

    Raises:
        pytest.UsageError: a file cannot be written, or the example cannot be repeated here.
    """
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        if session.settings.gpu_report:
            from mgpu_check.plugin.report.summaries import Summaries

            config.pluginmanager.register(Summaries(config, session), "mgpu_check_summary")
        if wanted(session.settings.gpu_annotations):
            from mgpu_check.plugin.report.annotations import Annotations

            config.pluginmanager.register(Annotations(config), "mgpu_check_annotations")
    if session.settings.asked and not config.option.collectonly:
        from mgpu_check.plugin.early import EarlyStart

        config.pluginmanager.register(EarlyStart(session), "mgpu_check_early")
    if config.getoption("gpu_replay"):
        from mgpu_check.plugin.report import example

        example.check(config.getoption("gpu_replay"))
