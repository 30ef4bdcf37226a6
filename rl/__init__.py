"""Compact reinforcement learning on groups: one GPU, or the CPU for tests.

Registries of named formulas, a group-aware generator, packed updates and a trainer. Does not know
routes, search or the learning loop. Source: named in each file.
"""
