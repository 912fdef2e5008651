"""A backend for a protocol of sdkde that is yet to come."""
