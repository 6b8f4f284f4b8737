"""`python -m bench.chaos`."""

from bench.chaos.main import main

main()
