"""The known mistakes of multi-GPU training code, and the report that names them."""
