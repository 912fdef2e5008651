"""Variables of the environment that switch something off."""

from __future__ import annotations

import os

from .messages import did_you_mean

__all__ = ["switched_off"]


def switched_off(variable: str) -> bool:
    """Whether a variable that is on by default says off.

    Raises
    ------
    ValueError
        It says neither on nor off.
    """
    on, off = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
    text = os.environ.get(variable, "").lower()
    if text and text not in (*on, *off):
        raise ValueError(f"{variable} is {text!r}; set 'off' or 'on'{did_you_mean(text, (*on, *off))}")
    return text in off
