"""Shared by the tool's own tests."""

pytest_plugins = ["pytester"]
