"""The command line. Exit codes: 0 done, 1 the asked-for check failed, 2 bad input or usage."""

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point. The commands take a while to import, and an interrupt may come by then."""
    try:
        from m2ncompile.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
