"""The learning run: loop, gate, evaluation and result."""
