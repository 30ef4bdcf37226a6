"""Language models that run inside this process."""
