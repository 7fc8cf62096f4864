"""Measure fleets of GPUs: checks per minute, two GPUs of one host, and a simulation of larger fleets."""
