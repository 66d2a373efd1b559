"""Generators of images that attacks search through: small decoders, trained on public images, kept in files."""
