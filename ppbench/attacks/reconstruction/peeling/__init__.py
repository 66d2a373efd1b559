"""Inversion of networks of convolutions, ReLU and max pooling, layer by layer from the first linear layer down."""
