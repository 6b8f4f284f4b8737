"""Ranks in several processes, mostly on several hosts: how they find each other, what they exchange, and how
node 0's plans reach the others."""
