"""Processes of a run, and what they say to each other: messages, records, output, temporary directories. Imports no torch."""
