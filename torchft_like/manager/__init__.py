"""Manager package."""
