"""A file a benchmark, or a few that belong together. Each adds its own to ``registry.REGISTRY``."""
