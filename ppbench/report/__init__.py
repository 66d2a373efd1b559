"""Reading records: controls, worst case, verdict, claims, comparison, the page."""
