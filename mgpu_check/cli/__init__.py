"""The subcommands of `mgpu-check`."""
