"""What an author is given to read."""
