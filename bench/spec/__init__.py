"""Speed-up by speculative decoding, against the same server without: `python -m bench.spec`."""
