"""From byte ranges to torch tensors: views, slices, streams, and a front like safe_open."""
