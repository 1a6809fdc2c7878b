"""Programs compiled ahead of time for devices that are not there, and their receipts."""
