"""The jail: check and trace a model's source without trusting it."""
