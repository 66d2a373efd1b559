"""`python -m ppbench` is the command `ppbench`."""

from ppbench.cli import main

if __name__ == "__main__":
    main()
