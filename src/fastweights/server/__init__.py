"""The classifier over HTTP, and a page to draw on: memories that classes are taught to, kept in one SQLite file."""
