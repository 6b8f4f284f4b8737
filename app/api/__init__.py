"""The routes of the server, a folder for each API that clients speak."""
