"""From logits to tokens, and the counts that penalties read."""
