"""Distillation of a context into weights."""
