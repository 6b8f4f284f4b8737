"""One captured step: what stands in device memory, and how it gets in and out."""
