"""Cases with known answers for backends: what is hard about them, and how far an answer is off.

:mod:`~sdkde_core.testing.problems` serves tests and benchmarks alike.
"""
