"""The commands, and how their errors end."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import NoReturn

import typer

from m2ncompile import __version__
from m2ncompile.cli.build import build_command
from m2ncompile.cli.cache import cache_app
from m2ncompile.cli.common import refusal
from m2ncompile.cli.diff import diff_command
from m2ncompile.cli.explain import explain_command
from m2ncompile.cli.rehearse import rehearse_command
from m2ncompile.cli.report import report_command
from m2ncompile.cli.show import show_command
from m2ncompile.cli.verify import verify_command
from m2ncompile.errors import M2nCompileError

__all__ = ["app", "run"]

app = typer.Typer(
    name="m2ncompile",
    help="Compile weight transfer from trainer shards to inference shards, ahead of time.\n\n"
    "Exit codes: 0 done, 1 the asked-for check failed, 2 bad input or usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("build")(build_command)
app.command("show")(show_command)
app.command("explain")(explain_command)
app.command("diff")(diff_command)
app.command("report")(report_command)
app.command("verify")(verify_command)
app.command("rehearse")(rehearse_command)
app.add_typer(cache_app, name="cache")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"m2ncompile {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def run() -> None:
    """Whatever ends a command is one message on stderr and an exit code."""
    # As other tools do when their reader goes away (`m2ncompile show ... | head`).
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _ready_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except M2nCompileError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        _end(_cause(error), 2)
    except UnicodeEncodeError as error:
        _end(f"not text: {error.object[:200]!r}", 2)
    except MemoryError:
        _end("out of memory", 2)
    except RecursionError:
        _end("the input is nested too deeply", 2)


def _ready_streams() -> None:
    """Makes every text printable, and closed streams lead nowhere."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:  # else the next file to be opened would get this number
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _cause(error: OSError) -> str:
    try:
        sys.stdout.flush()
    except OSError as lost:
        return f"can't write to the standard output: {lost.strerror}"
    return refusal(error)


def _end(text: str, code: int) -> NoReturn:
    try:
        print(f"error: {text}", file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr.fileno())
    try:
        sys.stdout.flush()
    except OSError:
        _drop(sys.stdout.fileno())
    sys.exit(code)


def _drop(fd: int) -> None:
    """What is still to be written there goes nowhere; the interpreter's exit would fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
