"""What speculative decoding gains, against the same server without: `python -m bench.spec`."""
