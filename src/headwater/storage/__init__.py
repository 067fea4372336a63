"""The durable side of the control plane: meta store, segments, checkpoint commit, garbage collection."""
