"""Load shapes, and a simulator that runs the real scheduler against them in virtual time."""
