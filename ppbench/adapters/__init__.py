"""Defenses of other frameworks. No other package names a framework; each is imported only when a user names it."""
