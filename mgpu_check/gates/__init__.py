"""The gate for training code: what runs on many devices does what it does on one, or which known mistake it makes."""
