"""The HTTP front end: a process of its own that parses, templates, tokenizes, and turns tokens back into answers."""
