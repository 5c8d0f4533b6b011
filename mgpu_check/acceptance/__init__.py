"""Accept or reject a node: tests of its parts, each part accused only if the same without it succeeds.

1. `plan.py` reads the options; `run.py` opens the run, and `conftest.py` hooks it into pytest.
2. The tests are in a folder for each part: `inventory`, `memory`, `compute`, `links`, `collectives`, `training`,
   `health`, `machine`, `performance`, `soak`. `node.py` calls their checks on GPUs and keeps the observations.
3. `telemetry.py` samples beside them; `references.py` has baselines and floors, `comparison.py` holds values against
   them.
4. `verdict.py` finds the smallest set of parts that explains the observations; `findings.py` says what each means.
5. `run_report.py` is the account, which `report/` writes; `performance/` compares many nodes, too.
"""
