"""What is derived from records: one table, one key, one worst case, and what may be said of them."""
