"""Faults for real jobs, and the invariants that hold whatever is injected."""
