"""The gate for training code: what runs on many devices does what it does on one, or which known mistake it makes.

In come the user's functions; out comes nothing, or an error with the smallest case and the likely mistake.

1. `step_gate.py`, `loader_gate.py`, `checkpoint_gate.py`, `evaluation_gate.py`, `agreement_gate.py`,
   `engines_gate.py`, `bitwise_gate.py` and `survival_gate.py` are the assertions. `gate_arguments.py` checks their
   arguments.
2. `search/` draws cases in the pytest process, and shrinks the first that fails.
3. `run/` runs one case in a rank: on one device with its tolerance, then on all ranks.
4. `comparison/` decides which relations hold between the two.
5. `explanation/` runs a failure again, changes single calls, and hands the evidence to `mgpu_check.diagnosis`.
"""
