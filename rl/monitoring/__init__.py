"""Metrics of a training run and its distance to the roofline."""
