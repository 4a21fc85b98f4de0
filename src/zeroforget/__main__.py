"""The command `zeroforget`, also as `python -m zeroforget`. It imports nothing before it can be stopped quietly."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from zeroforget import cli
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
