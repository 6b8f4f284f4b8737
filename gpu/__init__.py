"""Executes. Everything with a device; nothing here knows text or sockets."""
