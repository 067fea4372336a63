"""The entry point: errors become one clear text and an exit code, and nothing holds the process after its command."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import thread as executors
from typing import Final, NoReturn

import typer

from headwater.cli.commands import Options, app
from headwater.cli.visible import TEXT, visible
from headwater.errors import HeadwaterError, UsageError

LAST_THREADS_S: Final = 0.5  # those that are only about to end


def main() -> NoReturn:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    _leave(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False, prog_name="headwater")
        # Outside of standalone mode `typer.Exit` does not come through: its code is what is returned.
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except HeadwaterError as error:
        if Options.debug:
            raise
        sys.stderr.write(visible(error.render(), keep=TEXT) + "\n")
        return 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 1
    except BrokenPipeError:  # `headwater sql … | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if Options.debug:
            raise
        return _other_error(error)


def _other_error(error: Exception) -> int:
    # Newer versions of typer bring a click of their own: a usage error is known by what it can do, not by its class.
    explain = getattr(error, "format_message", None)
    if explain is not None and getattr(error, "exit_code", None) == 2:
        path = getattr(getattr(error, "ctx", None), "command_path", "headwater")
        message = str(explain()).rstrip(".")
        if message:  # else there was no command, and the help was shown instead
            sys.stderr.write(f"error: [USAGE] {visible(message[:1].lower() + message[1:])}\n  hint: {path} --help\n")
        return 2
    sys.stderr.write(f"error: [INTERNAL] {type(error).__name__}\n  hint: run again with --debug for the traceback\n")
    return 1


def _leave(code: int) -> NoReturn:
    """End the process. A thread that waits for a server that does not answer must not hold it: nobody needs it now."""
    until = time.monotonic() + LAST_THREADS_S
    # Python waits at its end for the threads of executors too, which are daemons where a daemon has made them.
    pooled = set(executors._threads_queues)
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and (not t.daemon or t in pooled)]
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
