"""Defects of copies."""

from __future__ import annotations
