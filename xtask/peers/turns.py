"""Turns: two programs that are compared measure alternately, so that both see the same drift of the machine.

Where `cargo xtask compare` sets `FRUGAL_TURNS`, each program prepares a case, writes `@turn DONE TOTAL` to standard error, waits for a
line on standard input, and measures one round.
"""

import os
import subprocess
import sys


class Turns:
    """The rounds of each of `cases` cases; one round without a number where nobody gives turns."""

    def __init__(self, cases):
        self.count = int(os.environ.get("FRUGAL_TURNS", "0"))
        self.done, self.total = 0, cases * max(self.count, 1)

    def rounds(self):
        """Yields the number of each round when it is this program's turn."""
        if self.count == 0:
            yield None
            return
        for turn in range(self.count):
            print(f"@turn {self.done} {self.total}", file=sys.stderr, flush=True)
            if not sys.stdin.readline():
                sys.exit("error: the process that gives the turns has ended")
            self.done += 1
            yield turn

    def is_last(self, turn):
        return turn is None or turn + 1 == self.count


class Delegate:
    """Another process of this script, which measures levels that change classes for the whole process, in turn with this one."""

    def __init__(self, args, **changed):
        """Starts it with this process's arguments, but for those in `changed`."""
        values = {name: value for name, value in (vars(args) | changed).items() if value is not None and value is not False}
        flags = [text for name, value in values.items() for text in ("--" + name.replace("_", "-"), str(value))]
        command = [sys.executable, os.path.abspath(sys.argv[0]), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.waits = False
        self.settle()

    def settle(self):
        """Reads what it writes until it waits for its turn, or has ended."""
        self.waits = False
        for line in self.process.stderr:
            if line.startswith("@turn "):
                self.waits = True
                return
            sys.stderr.write(line)
        if self.process.wait() != 0:
            sys.exit(f"error: the process of {' '.join(self.process.args[2:])} ended with {self.process.returncode}")

    def turn(self):
        """Lets it measure one round."""
        if self.waits:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.settle()
