from mgpu_check.node.simulated.patches import Patches


def install_autocast(patches: Patches) -> None:
    return None
