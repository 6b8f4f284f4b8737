"""Where a model's files come from."""
