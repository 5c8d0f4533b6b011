"""Property: parallel steps give the gradients of one device."""
