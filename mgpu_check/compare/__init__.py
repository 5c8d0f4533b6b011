"""A training script as it is, on one device and on several ranks: the first step and parameter that part ways."""
