"""Triton kernels and their launchers: one operation per file, its plain-torch twin in `reference.py`.

Launchers allocate nothing that a caller could not have passed, read nothing back from the device and
choose no grid from device data, so a captured graph of them serves any lengths and any routing.
"""
