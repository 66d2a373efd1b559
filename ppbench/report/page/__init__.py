"""CSV, figures and HTML, derived from records."""
