"""Nodes that a scheduler started one by one find each other and agree."""
