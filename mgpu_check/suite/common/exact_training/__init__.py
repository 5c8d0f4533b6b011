"""Training without rounding: any distribution over devices gives the same bits."""
