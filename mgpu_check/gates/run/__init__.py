"""Run one case of the user's step in a rank: measure it on one device, record it on several, change single calls."""
