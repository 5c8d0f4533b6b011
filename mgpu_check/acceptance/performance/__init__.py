"""Performance of GPUs and links, compared with each other, a baseline and the floors of the SKU."""
