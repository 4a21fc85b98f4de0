"""`python -m zeroforget` is the command `zeroforget`."""

from zeroforget.cli import main

main()
