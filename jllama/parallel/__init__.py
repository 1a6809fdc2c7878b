"""Many devices and many processes: the mesh, its rules, and what is exchanged."""
