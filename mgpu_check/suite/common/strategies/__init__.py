"""Strategies of tensors and of worlds, for several properties."""
