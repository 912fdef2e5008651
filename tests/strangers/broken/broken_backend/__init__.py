"""A backend for sdkde that fails on import."""
