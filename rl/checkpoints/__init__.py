"""Reading and writing weights: safetensors and JSON only."""
