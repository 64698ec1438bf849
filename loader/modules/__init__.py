"""From tensors to modules: parameters that wait for their own bytes, and whole transformers models."""
