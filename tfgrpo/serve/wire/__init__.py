"""Bytes in and out: bodies, errors, upstream calls, event streams. Knows no route, key or money."""
