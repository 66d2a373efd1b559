"""Images from the features that the head's gradient reveals, and from the backbone's gradient."""
