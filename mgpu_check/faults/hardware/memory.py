"""Defects of memory."""

from __future__ import annotations
