"""Architectures, one file each; a model is a `Classifier`: features, then one linear head."""
