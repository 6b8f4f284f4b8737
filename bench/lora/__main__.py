"""`python -m bench.lora`."""

from bench.lora.main import main

if __name__ == "__main__":
    main()
