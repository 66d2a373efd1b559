"""A Flower app, laid out as Flower's quickstart is, that tests/test_flower_app.py runs."""
