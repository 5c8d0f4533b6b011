"""May this node join the fleet, and if not, which part of it goes back? The packaged acceptance suite, and its verdict."""
