"""Which files of a folder make up a checkpoint, and which of them holds which tensor."""
