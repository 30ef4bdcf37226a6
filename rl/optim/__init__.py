"""Optimiser, master weights and LoRA."""
