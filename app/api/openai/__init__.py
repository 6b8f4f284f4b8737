"""OpenAI's chat, completions, models, files and batches."""
