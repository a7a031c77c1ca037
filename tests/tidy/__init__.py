"""Rules of the code, checked: see rules.py."""
