"""Judge proposed elementwise primitives."""
