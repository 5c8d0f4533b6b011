"""The pytest plugin: options, hooks, fixtures, and the run of a test on ranks."""
