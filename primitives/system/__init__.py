"""What the project asks of the operating system: processes, deadlines, files, confinement."""
