"""Exchange of gradients and parameters between ranks."""
