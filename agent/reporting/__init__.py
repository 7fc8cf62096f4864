"""What people read: tables, charts and pages."""
