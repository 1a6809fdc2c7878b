"""Small things that several rooms use: errors, files, caches, devices, signals."""
