"""How ranks exchange gradients and parameters."""
