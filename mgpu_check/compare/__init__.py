"""Run an unchanged training script on one device and on several ranks, and find the first step and parameter that
differ."""
