"""`python -m stfseb` is the command `stfseb`: for a Python whose scripts are not on the path."""

from stfseb.cli import main

if __name__ == "__main__":
    main()
