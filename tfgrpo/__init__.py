"""tfgrpo: make LLM agents better from a few dozen examples."""
