"""A model's text as reasoning, content and tool calls."""
