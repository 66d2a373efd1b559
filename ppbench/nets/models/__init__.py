"""Architectures, one file each; a model is a `Classifier`: features, then one linear head.

A model is a function of the shape of an input without the batch axis, the number of classes (or outputs of a
regression), and its own options; it raises ValueError, the second half of a sentence, where one of them cannot be used.
"""
