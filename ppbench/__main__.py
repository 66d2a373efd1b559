"""`python -m ppbench` is the command `ppbench`."""

from ppbench_fl import main

if __name__ == "__main__":
    main()
