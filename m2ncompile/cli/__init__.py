"""The command line. Exit codes: 0 done, 1 the asked-for check failed, 2 bad input or usage."""

from m2ncompile.cli.app import main

__all__ = ["main"]
