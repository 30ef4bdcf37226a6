"""Hint schedulers: when a task gets which hint. Imports no torch."""
