"""One copy of a model's weights per node, in shared memory, for all engines of the node: docs/weights.md."""
