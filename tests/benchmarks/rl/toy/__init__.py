"""A tiny language of chained sums, a model that knows it badly, and what runs an arm on it."""
