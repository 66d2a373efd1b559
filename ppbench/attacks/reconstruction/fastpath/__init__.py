"""The matching loss and its gradient without a double-backward graph, for plain chains of layers (`chain`)."""
