"""Attention over pages: decode, chunks, keys shared by rows, and the merge of partial results."""
