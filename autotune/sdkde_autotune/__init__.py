"""The autotuner: searches launch configurations, remembers them in SQLite, and answers backends from there."""
