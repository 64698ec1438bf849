"""LoRA adapters: read, checked against the base, versioned, attached over the shared base."""
