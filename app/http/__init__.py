"""The HTTP server: bodies, errors, event streams, middleware."""
