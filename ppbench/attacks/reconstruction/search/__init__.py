"""The searches of reconstruction attacks: starts, the problem that is minimized, and two minimizers."""
