"""Operating-system services: processes, deadlines, files, confinement."""
