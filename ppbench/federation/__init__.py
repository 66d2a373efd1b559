"""Training: the Defense contract, the Wire, rounds, local training."""
