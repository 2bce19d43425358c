"""Names that several packages must agree on, each written once. Standard library only."""
