"""The commands, and how their errors end."""

from __future__ import annotations

import signal
import sys

import typer

from m2ncompile import __version__
from m2ncompile.cli.build import build_command
from m2ncompile.cli.cache import cache_app
from m2ncompile.cli.diff import diff_command
from m2ncompile.cli.explain import explain_command
from m2ncompile.cli.rehearse import rehearse_command
from m2ncompile.cli.report import report_command
from m2ncompile.cli.show import show_command
from m2ncompile.cli.verify import verify_command
from m2ncompile.errors import M2nCompileError

__all__ = ["app", "main"]

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


def main() -> None:
    """Entry point: a user's error becomes one message on stderr and its exit code."""
    # As other tools do when their reader goes away (`m2ncompile show ... | head`).
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app()
    except M2nCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
