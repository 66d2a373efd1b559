"""The version of ppbench, which is part of every record and of the names of trainings; `pyproject.toml` reads it."""

__version__ = "0.1.0"
