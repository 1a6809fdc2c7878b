"""What surrounds a model: presets, rotary scalings, adapters, layouts, the NumPy reference."""
