"""`python -m bench.spec`."""

from bench.spec.main import main

if __name__ == "__main__":
    main()
