"""Rollout budgets: how many rollouts each task gets."""
