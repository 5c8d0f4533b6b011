"""The comparison of scripts, as the core knows it."""

from __future__ import annotations

from mgpu_check.applications import Application

APPLICATION = Application(package="mgpu_check.compare", frames="engine")
