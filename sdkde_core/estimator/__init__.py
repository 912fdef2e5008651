"""The estimators: what was asked for, the bandwidth, the plan, the fitted columns, and the density from their sums."""
