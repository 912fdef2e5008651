"""Estimates of more than one process or memory holds."""
