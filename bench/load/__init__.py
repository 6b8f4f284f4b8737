"""A load generator for any OpenAI-compatible server. Imports no code of the engine."""
