"""Which form of an operation runs: measured once for a shape on the GPU that runs, and kept on disk."""
