"""Metrics of images, membership, labels, tracing, segmentation and audits, with confidence intervals."""
