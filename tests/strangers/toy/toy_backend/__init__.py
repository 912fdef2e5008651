"""A backend for sdkde in plain NumPy: direct differences, one row at a time."""
