"""Proposers of actions."""
