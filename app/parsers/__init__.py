"""From a model's text to what it means: reasoning, content, tool calls."""
