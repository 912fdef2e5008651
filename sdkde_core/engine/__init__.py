"""The sums: outliers, packed columns, exact sums, and how partial results merge."""
