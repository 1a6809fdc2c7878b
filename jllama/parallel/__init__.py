"""Meshes of devices."""
