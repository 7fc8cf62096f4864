"""Tables, charts and pages for people."""
