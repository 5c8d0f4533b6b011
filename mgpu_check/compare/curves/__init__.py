"""Comparisons of loss curves, where repeated runs show how far right runs part."""
