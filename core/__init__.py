"""The scheduling side: decides what runs. Pure Python over integers; no torch, no sockets, no text, no
device."""
