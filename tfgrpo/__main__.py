"""`python -m tfgrpo` is the command line."""

from tfgrpo.cli.main import run_program

run_program()
