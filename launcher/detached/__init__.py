"""Runs that are left alone: started, kept, and looked after without the terminal they came from."""
