"""Search, in the pytest process, for the smallest case that fails: draw scenarios, and run each on ranks."""
