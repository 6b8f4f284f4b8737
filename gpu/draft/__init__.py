"""Drafters: what proposes the tokens that the next step verifies."""
