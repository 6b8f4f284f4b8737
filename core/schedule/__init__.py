"""The scheduler: which request gets tokens, pages and a slot in the next step, and which is retracted."""
