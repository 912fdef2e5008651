"""What every test runs under."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """What a user has measured on this machine must not decide what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("SDKDE_BACKEND", "SDKDE_PRECISION", "SDKDE_NUM_THREADS", "SDKDE_TUNING", "SDKDE_DB"):
            patch.delenv(name, raising=False)
        yield
