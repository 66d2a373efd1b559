"""What reconstruction attacks search: starts, the problem that rows of numbers have to solve, and two minimizers."""
