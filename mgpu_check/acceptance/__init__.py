"""The packaged acceptance suite: check a node, decide whether it may join the fleet, and name the parts at fault."""
