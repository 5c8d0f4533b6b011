"""Defects of compute."""

from __future__ import annotations
