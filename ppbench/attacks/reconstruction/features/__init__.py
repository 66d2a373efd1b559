"""Images from the features that the head's gradient gives away, and from the backbone's gradient."""
