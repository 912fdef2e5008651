"""What every test runs under."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Rates of this CPU that a user has measured must not decide what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("SDKDE_BACKEND", "SDKDE_PRECISION", "SDKDE_NUM_THREADS", "SDKDE_TUNING"):
            patch.delenv(name, raising=False)
        yield
