"""Policies: what acts on a task under a context."""
