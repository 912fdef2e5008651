"""Shared by the project's commands: errors in one line, signals that stop the work, arguments with help, tables."""

from __future__ import annotations

import functools
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..messages import SdkdeWarning
from ..protocol import BackendUnavailable


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn an error that users can correct into one line, and what sdkde warns of into another."""
    correctable = click.ClickException, OSError, ValueError, TypeError, BackendUnavailable, ImportError, MemoryError
    try:
        with warnings.catch_warnings():
            otherwise = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
                if issubclass(category, SdkdeWarning):
                    click.echo(f"Warning: {_flat(str(message))}", err=True)
                else:
                    otherwise(message, category, *where)

            warnings.showwarning = show  # type: ignore[assignment]
            yield
    except BrokenPipeError:  # the reader of a pipe has left: click ends quietly
        raise
    except correctable as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{error.filename}: {error.strerror}"
        raise click.UsageError(_flat(text) or type(error).__name__) from error  # its exit status is 2


def _flat(text: str) -> str:
    return re.sub(r"\s*\n\s*", "; ", re.sub(r":\s*\n\s*", ": ", text.strip()))


@contextmanager
def _signals() -> Iterator[None]:
    """End a command after SIGINT, SIGTERM or SIGHUP with 128 plus the signal's number as the exit status.

    An exception lets half-written files be removed. It is raised until it is heard: imports lose some, in callbacks of
    weak references and in compiled modules. Signals that are ignored, as nohup has it, stay so.
    """
    received, before = list[int](), dict[int, Any]()

    def stop(number: int, frame: Any) -> None:
        received.append(128 + number)
        if hasattr(signal, "SIGALRM") and signal.SIGALRM not in before:  # until now it was another's
            before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM) or signal.SIG_DFL
            signal.signal(signal.SIGALRM, stop)
        raise_again(2.0)
        heard = isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit)  # by what may take long to remove files
        if number != getattr(signal, "SIGALRM", 0) or not heard:
            raise KeyboardInterrupt if received[0] == 128 + signal.SIGINT else SystemExit(received[0])

    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        if received:
            raise_again(0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            raise SystemExit(received[0]) from None


def raise_again(seconds: float) -> None:
    """Have a signal that has come raise its exception again after so many seconds; 0: it is heard, and need not."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


class Group(click.Group):
    """A group of commands whose expected errors are printed as one line, and which end after a signal."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of the source, not of the alphabet

    def main(self, *args: Any, **extra: Any) -> Any:
        with _signals():
            return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


class Argument(click.Argument):
    """An argument with a help text, which older versions of click lack."""

    def __init__(self, declarations: Sequence[str], help: str, **extra: Any) -> None:
        super().__init__(declarations, **extra)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, self.help or ""


def together(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda command: functools.reduce(lambda made, decorator: decorator(made), reversed(decorators), command)


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
