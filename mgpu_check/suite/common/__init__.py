"""Data, worlds, references and planted faults that several properties share."""
