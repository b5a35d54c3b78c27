"""The real scheduler in virtual time: a cost model says how long a step takes, events what happens in between."""
