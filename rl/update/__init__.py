"""From groups to gradients: rows, features, log-probabilities, accumulation."""
