"""The safetensors format: headers, dtypes, and what a file is when it is none."""
