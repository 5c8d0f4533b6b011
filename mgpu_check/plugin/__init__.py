"""The pytest plugin: options, hooks, fixtures, and the execution of tests on ranks."""
