from sdkde_core.testing import BackendConformance


class TestJax(BackendConformance):
    backend = "jax"
