"""Recipes: typical hand-written code for several devices, which the checks test."""
