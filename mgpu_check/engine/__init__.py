"""The engine: warm processes, one per rank, that run functions in lockstep and heal.

In comes a function with its arguments and a size; out comes an outcome, the results of all ranks or one error.

1. `pool.py` picks a warm world of this size, or has one forked; `world.py` sends the function to it.
2. `launcher.py` asks a process that has imported torch: `forkserver.py` here (`keeper.py` keeps it for later runs),
   agents on other hosts through `remote/`. `environments.py` says with which variables.
3. `rank_side/worker.py` runs the function in each rank; `rank_side/state.py` restores the rank afterwards.
4. `world_processes.py` waits for the answers, `lockstep.py` compares the calls of the ranks.
5. `failures.py` makes one error of what went wrong. The pool ends a broken world, and the next call gets another.
"""
