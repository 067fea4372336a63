"""SQL: text → statements → commands. `parser.py` knows the grammar, `binding.py` the tables inside a query."""
