"""Supervision of a running job: agents, hangs, root causes."""
