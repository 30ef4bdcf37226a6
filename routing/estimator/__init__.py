"""The value model: predicted success per task and model."""
