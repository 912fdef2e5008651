"""Shared by the project's commands: errors in one line, arguments with help, tables, signals that stop the work."""

from __future__ import annotations

import functools
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..messages import SdkdeWarning, did_you_mean
from ..protocol import BackendUnavailable

__all__ = ["Argument", "Choice", "Group", "json_option", "stopped_by_signals", "table", "together"]

#: Errors that a user can correct: bad input, a missing file or package, too little memory.
EXPECTED = (ValueError, TypeError, BackendUnavailable, OSError, ImportError, MemoryError)


class _Refused(click.ClickException):
    """One line on standard error, and exit status 2."""

    exit_code = 2


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn an expected error, click's own included, into one line, and what sdkde warns of into another.

    Any other error is a bug and keeps its traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show, warnings.showwarning)
            yield
    except BrokenPipeError:  # the reader of a pipe has left: click ends quietly
        raise
    except click.ClickException as error:
        raise _Refused(_flat(error.format_message())) from error
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise _Refused(_flat(where)) from error
    except EXPECTED as error:
        raise _Refused(_flat(str(error)) or type(error).__name__) from error


def _show(otherwise: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    if issubclass(category, SdkdeWarning):
        click.echo(f"Warning: {_flat(str(message))}", err=True)
    else:
        otherwise(message, category, *where)


def _flat(text: str) -> str:
    return re.sub(r"\s*\n\s*", "; ", re.sub(r":\s*\n\s*", ": ", text.strip()))


class Group(click.Group):
    """A group of commands whose expected errors are printed as one line."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


class Choice(click.Choice):
    """One of several words; for another it names the one that may be meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = did_you_mean(value, map(str, self.choices))
            raise click.BadParameter(error.message.rstrip(".") + hint, ctx, param) from error


class Argument(click.Argument):
    """An argument with a help text, which older versions of click lack."""

    def __init__(self, declarations: Sequence[str], help: str, **extra: Any) -> None:
        super().__init__(declarations, **extra)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, self.help or ""


def together(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return several options as one decorator; ``--help`` lists them in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that a half-written file is removed as after an interrupt."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
