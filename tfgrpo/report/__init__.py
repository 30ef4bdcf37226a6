"""What a run shows: one summary, as HTML, JSON or Markdown, from a journal or while it runs."""
