"""The commands: a module each, whose ``main(arguments)`` returns an exit code of `codes.py`.

`mgpu_check.__main__` picks the module. `launcher.py` runs a command as one of many processes of torchrun or srun.
`startup/` is code that Python processes run before the user's.
"""
