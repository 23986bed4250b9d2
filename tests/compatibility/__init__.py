"""Compatibility of releases: protocol versions, unknown fields, saved states."""
