"""A program in a pseudo-terminal, controlled by what it prints."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time

SECONDS = 60


class Terminal:
    """A program in a terminal, in a directory."""

    def __init__(self, command, directory):
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            os.chdir(directory)
            os.environ.update(PS1="$ ", TERM="xterm", INPUTRC="/dev/null", HOME=str(directory), ZDOTDIR=str(directory))
            os.execvp(command[0], command)

    def say(self, text, expected):
        """Type `text`, and return the match of `expected` in what the program writes then."""
        os.write(self.terminal, text.encode())
        heard, until = "", time.monotonic() + SECONDS
        while not (found := re.search(expected, heard)):
            assert time.monotonic() < until, f"{text!r}: {expected!r} is not in {heard!r}"
            if select.select([self.terminal], [], [], 0.1)[0]:
                try:
                    heard += os.read(self.terminal, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    raise AssertionError(f"{text!r}: {expected!r} is not in {heard!r}") from None
        return found

    def close(self):
        """End the program, and return its exit status if it has ended by itself, else None."""
        ended, status = os.waitpid(self.child, os.WNOHANG)
        if not ended:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(status) if ended else None
