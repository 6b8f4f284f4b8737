"""Decides. Pure Python over integers: no torch, no sockets, no text, no device."""
