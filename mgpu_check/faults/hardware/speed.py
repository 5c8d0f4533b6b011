"""Defects of speed."""

from __future__ import annotations
