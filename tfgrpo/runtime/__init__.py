"""What the process needs and no domain knows: identities, safe text, foreign code, event loops."""
