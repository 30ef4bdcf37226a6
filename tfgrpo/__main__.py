"""`python -m tfgrpo` is the command line."""

from tfgrpo.cli import main

main()
