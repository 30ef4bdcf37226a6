"""Task files, splits by task id, and refusal of splits that overlap."""
