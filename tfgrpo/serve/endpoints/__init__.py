"""One file an endpoint family."""
