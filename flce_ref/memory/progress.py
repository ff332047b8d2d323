"""A progress line for simulations that take long."""

from __future__ import annotations

import sys
import time

from . import private


class Progress:
    """A line on standard error once a simulation has taken two seconds, if that is a terminal."""

    _PATIENCE, _EVERY = 2.0, 512  # seconds; operators between looks at the clock

    def __init__(self, title: str) -> None:
        self.first_node: int | None = None
        self.last_node: int | None = None
        self._title = title
        self._started = time.monotonic()
        self._operators = 0
        self._shown = False
        self._visible = sys.stderr is not None and sys.stderr.isatty()

    def operator(self) -> None:
        self._operators += 1
        if self._visible and self._operators % self._EVERY == 0:
            elapsed = time.monotonic() - self._started
            if elapsed > self._PATIENCE:
                self._shown = True
                print(f"\r{self._line(elapsed)}", end="", file=sys.stderr, flush=True)

    def _line(self, elapsed: float) -> str:
        line = f"simulating {self._title}: {self._operators:,} operators, {elapsed:.0f} s"
        now = private.node_number(private.current_node())
        if now is None or self.first_node is None or self.last_node is None:
            return f"{line}, forward"
        total = max(1, self.last_node - self.first_node)
        done = min(max((self.last_node - now) / total, 0.0), 1.0)
        bar = "#" * round(20 * done)
        return f"{line}, backward [{bar:.<20}]"

    def close(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
