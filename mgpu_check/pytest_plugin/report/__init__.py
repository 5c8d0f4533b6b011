"""Report a run: failures of ranks in pytest's reports, progress, and the closing table."""
