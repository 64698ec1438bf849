"""Benchmarks: one runner, one result schema, ours and peers side by side."""
