"""Defects of collectives."""

from __future__ import annotations
