"""House rules with replies written by hand."""
