"""Run the command line for `python -m responses_mw`."""

from .cli import main

if __name__ == "__main__":
    main()
