"""Shared by the tool's own tests.

pytest.ini loads `pytester`: this file is above the packaged tests, and pytest refuses `pytest_plugins` in a file that
is not at the root of the run.
"""
