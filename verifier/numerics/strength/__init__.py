"""Test the tests: do the tried inputs need every part of a program, and does every mutant of a spec fail?"""
