"""The HTTP service: one base, many adapters."""
