"""The command line. `main` is the entry point; `commands.py` has the commands, `client.py` the way to a running engine,
`output.py` the spelling of results, `live.py` progress in the terminal.
"""

from headwater.cli.entry import main

__all__ = ["main"]
