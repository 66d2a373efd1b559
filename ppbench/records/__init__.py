"""Records of evaluated cells: schema, store, verification."""
