"""The version of ppbench: it stands in every record and names trainings; `pyproject.toml` reads it here."""

__version__ = "0.1.0"
