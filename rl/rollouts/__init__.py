"""Rollout makers of a training step: single turn, several turns, hints, replay."""
