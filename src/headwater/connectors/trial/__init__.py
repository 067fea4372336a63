"""Sinks for trying things out (print, blackhole) and the user's own class (python)."""
