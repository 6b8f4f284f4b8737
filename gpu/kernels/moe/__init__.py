"""Routed experts: routing, grouped products, the weighted sum."""
