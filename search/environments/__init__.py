"""Environments that a search acts in."""
