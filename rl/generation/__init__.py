"""Token generation: continuous batching over a paged cache, and vLLM engines."""
