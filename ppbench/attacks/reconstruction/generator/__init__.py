"""Generators of images that attacks search through: small decoders, trained on public images, stored in files."""
