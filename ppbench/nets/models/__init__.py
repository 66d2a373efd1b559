"""Architectures, one file each: functions of an input's shape, the number of classes, and options of their own.

They return a `Classifier`, or raise ValueError, the second half of a sentence, where one of these cannot be used.
"""
