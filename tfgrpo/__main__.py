"""`python -m tfgrpo` is the command line."""

from tfgrpo.cli import run_program

run_program()
