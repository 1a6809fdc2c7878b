"""Programs compiled ahead of time for absent devices, and their receipts."""
