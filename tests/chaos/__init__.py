"""Faults into real jobs, and the tools that inject and judge them."""
