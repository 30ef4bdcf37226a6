"""Offers a local model over the OpenAI-compatible protocol."""
