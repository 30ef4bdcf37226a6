"""A run's journal in a file: opening, writing, locking, and the cache that several runs share."""
