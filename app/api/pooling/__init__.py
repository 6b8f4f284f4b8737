"""Embeddings, scores, ranks and classes."""
