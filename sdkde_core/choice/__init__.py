"""The choice of a backend: what is installed, what hardware is here, what a pass costs."""
