"""Which request gets tokens, pages and a slot in the next step, and who gives them back."""
