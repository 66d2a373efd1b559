"""Federated training: the Defense contract, the wire, rounds and local training."""
