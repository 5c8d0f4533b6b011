"""Run an unchanged training script on one device and on several ranks, and find the first difference."""
