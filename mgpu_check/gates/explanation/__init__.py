"""Explain a failure: run it again, gather evidence for the known mistakes, and write the report."""
