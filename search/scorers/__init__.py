"""Scorers of nodes."""
