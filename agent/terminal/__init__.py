"""Print to the terminal: safe text, and the console for tables."""
