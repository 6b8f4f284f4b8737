"""Commands besides the server, each run as `python -m app NAME`."""
