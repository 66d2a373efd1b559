"""Networks, losses, and walking a network for where scales enter."""
