"""Costs per batch that do not depend on the machine."""
