"""Low-rank adapters: their shapes, first values, and how they join the weights that they adapt."""
