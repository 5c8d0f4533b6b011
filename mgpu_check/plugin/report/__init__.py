"""Report a run: failures of ranks in pytest's reports, progress, the closing table and the Markdown summary."""
