"""FedPC (Cao et al. 2022): a pilot sends its model, the others a cost and a ternary vector."""
