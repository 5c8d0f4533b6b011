"""Defects of telemetry."""

from __future__ import annotations
