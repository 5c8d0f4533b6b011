"""Version of mgpu-check."""

__version__ = "0.1.0"
