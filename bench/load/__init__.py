"""A load generator for any OpenAI-compatible server. Imports nothing of the engine."""
