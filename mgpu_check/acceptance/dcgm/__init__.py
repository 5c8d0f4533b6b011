"""Results of DCGM's diagnostic, in the same verdict and reports."""
