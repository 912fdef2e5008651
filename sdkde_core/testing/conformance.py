"""The suite as a pytest class: a plugin's whole test file is a subclass with a name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

try:
    import pytest
except ImportError as error:
    raise ImportError(f"the conformance suite needs pytest: pip install 'sdkde-core[testing]' ({error})") from error

from sdkde_core.choice import registry

from .checks import CHECKS, FIRST, PROFILES, NotDeclared, Profile, Target, cases


class BackendConformance:
    """Every check of the backend protocol that a backend's declarations call for.

    ::

        from sdkde_core.testing import BackendConformance

        class TestMine(BackendConformance):
            backend = "mine"
            xfail = {"tolerance[fast-mean-tails-d784-e10000]": "accumulates in float32; issue 12"}
    """

    backend: ClassVar[str] = ""  #: the entry point's name
    #: By default every declared kind of device that the backend finds here (``"cuda"`` as ``"cuda:0"``).
    device: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}  #: ``backend_options``
    #: ``"quick"`` or ``"full"``; by default the environment variable ``SDKDE_CONFORMANCE``, else quick.
    profile: ClassVar[str | None] = None
    dimensions: ClassVar[tuple[int, ...] | None] = None  #: instead of the profile's, if the backend compiles for each
    draws: ClassVar[int | None] = None  #: instead of the profile's number of random problems, for what is slow here
    pairs: ClassVar[int | None] = None  #: rows times columns of such a problem at most, likewise
    slow: ClassVar[tuple[str, ...]] = ()  #: checks, or ``"check[param]"``, that are given the marker ``slow``
    #: ``{"check[param]": reason}``: known failures. Strict: one that passes fails the run. The name of a check alone
    #: stands for all its parameters.
    xfail: ClassVar[Mapping[str, str]] = {}
    _told: ClassVar[bool] = False

    @classmethod
    def _profile(cls) -> Profile:
        chosen = PROFILES[cls.profile or os.environ.get("SDKDE_CONFORMANCE") or "quick"]
        given: dict[str, Any] = {name: getattr(cls, name) for name in ("draws", "pairs", "dimensions")}
        given["drawn_dimensions"] = cls.dimensions
        changed = {name: value for name, value in given.items() if value is not None}
        return chosen._replace(**changed, includes=None) if changed else chosen

    @classmethod
    @functools.cache
    def _targets(cls) -> list[Target]:
        """Return the backend on every device that it can use here; a failure where there is none."""
        record = registry.find(cls.backend)
        assert record is not None, f"backend {cls.backend!r} is not installed"
        assert record.ok and record.info is not None, f"backend {cls.backend!r} is {record.status}: {record.reason}"
        backend = record.info.load(cls.options)
        places = [cls.device] if cls.device else ["cuda:0" if kind == "cuda" else kind for kind in record.info.devices]
        probed = {place: backend.probe(place) for place in places}
        usable = [Target(record.info, backend, place) for place, support in probed.items() if support.ok]
        causes = "; ".join(f"{place}: {support.reason}" for place, support in probed.items()) or "declares no device"
        assert usable, f"backend {cls.backend!r} runs on no device here, so nothing was executed ({causes})"
        return usable

    @classmethod
    @functools.cache
    def _unusable(cls) -> str:
        """Return why the checks would prove nothing, or nothing."""
        try:
            for target in cls._targets():
                CHECKS[FIRST].run(target, "backend")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give every check the parameters that the backend's declarations call for."""
        if (name := metafunc.function.__name__.removeprefix("test_")) not in CHECKS:
            return
        info = getattr(registry.find(self.backend), "info", None)
        parameters = CHECKS[name].parameters(info, self._profile()) if info and info.precisions else ["backend"]
        given = []
        for parameter in parameters:
            marks = [pytest.mark.slow] if {name, f"{name}[{parameter}]"} & set(self.slow) else []
            if (reason := self.xfail.get(f"{name}[{parameter}]", self.xfail.get(name))) is not None:
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            given.append(pytest.param(parameter, id=parameter, marks=marks))
        if not given:
            given = [pytest.param("", id="-", marks=pytest.mark.skip(f"the backend does not declare {name}"))]
        metafunc.parametrize("parameter", given)

    def test_expected_failures_are_real_and_have_reasons(self) -> None:
        """Every key of ``xfail`` names a check that runs, with a reason."""
        known = set(CHECKS)
        if (info := getattr(registry.find(self.backend), "info", None)) is not None:
            profiles = (self._profile(), PROFILES["full"])
            known |= {f"{name}[{parameter}]" for profile in profiles for name, parameter in cases(info, profile)}
        for key, reason in self.xfail.items():
            assert key in known, f"xfail names {key!r}, which is no check of this backend"
            assert isinstance(reason, str) and reason.strip(), f"xfail[{key!r}] has no reason"


def _test(name: str) -> Callable[..., None]:
    def test(self: BackendConformance, parameter: str) -> None:
        if cause := self._unusable():  # the first check that runs fails and says why, the others are skipped
            told, type(self)._told = self._told, True
            if told:
                pytest.skip(f"one check has failed for all: {cause}")
            pytest.fail(cause, pytrace=False)
        targets, skipped = self._targets(), []
        for target in targets:
            try:
                CHECKS[name].run(target, parameter)
            except NotDeclared as reason:
                skipped.append(f"{target.device}: {reason}")
        if len(skipped) == len(targets):
            pytest.skip("; ".join(skipped))

    test.__name__, test.__doc__ = f"test_{name}", CHECKS[name].function.__doc__
    return test


for _name in CHECKS:
    setattr(BackendConformance, f"test_{_name}", _test(_name))
