"""`python -m verdraft` is the `verdraft` command."""

from verdraft.server.cli import main

if __name__ == "__main__":
    main()
