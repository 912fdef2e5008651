"""Benchmarks: ``python -m benchmarks list | run NAME … | report FOLDER``. README.md says who is who."""
