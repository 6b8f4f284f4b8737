"""Talks. Everything with a socket or a string."""
