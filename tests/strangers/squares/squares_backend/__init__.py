"""A backend for sdkde: expanded squares in float64, on the CPU."""
