"""Registries of named formulas: advantages, losses, rewards, credit, aggregations."""
