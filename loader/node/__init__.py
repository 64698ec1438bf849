"""The node cache: blobs that all processes of a machine fill and read, and the threads that fill them."""
