"""Faults for real jobs, and what must hold whatever is injected."""
