"""Compare the times and the moved bytes of derived backward programs with those of backwards arranged by
hand."""
