"""Search algorithms over one tree."""
