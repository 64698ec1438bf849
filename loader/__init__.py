"""Reads checkpoints: headers, byte ranges, stores, the node cache, tensors as views."""
