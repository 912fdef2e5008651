"""The autotuner: searches launch configurations, stores them in SQLite, and looks them up for backends."""
