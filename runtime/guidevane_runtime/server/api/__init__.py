"""The routes, one module per family. A handler parses, admits, generates and writes; the work is done elsewhere."""
