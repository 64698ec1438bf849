"""Object stores: names become requests, and answers become bytes that were checked."""
