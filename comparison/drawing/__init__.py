"""The results of a comparison as tables, charts and pages."""
