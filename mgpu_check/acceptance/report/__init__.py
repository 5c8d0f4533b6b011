"""Reports of a report: files for people and for programs, the summary on a terminal, and the live progress line."""
