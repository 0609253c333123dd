"""Coordinators whose members change while they are used; docs/elastic-coordinator.md says how to use them."""
