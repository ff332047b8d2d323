"""The grader's side of the other process: start it, ask it, watch it, end it.

What the grader may believe: numbers, once it has compared them itself, and what the kernel says about the process (how
much memory it has, whether it lives). Time, memory and the size of an answer are bounded; whatever goes wrong in
there becomes an :class:`Ended` or a :class:`Failed` here, with a sentence that can be shown to the student.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .channel import Channel
from .child import Arrays, pack

CHILD = Path(__file__).with_name("child.py")
MIB = 2**20


class Failed(Exception):
    """The student's function raised an exception, or returned what is no answer."""


class Ended(Exception):
    """The student's process is gone: it ended itself, or was ended for its time, its memory or its answers."""


@dataclass(frozen=True)
class Limits:
    """What one process may use.

    Attributes:
        call_seconds: for one call of one function, or for running the file.
        start_seconds: for starting Python and importing torch, before anything of the student's.
        total_seconds: for all of it, the processes that replace one that ended included.
        memory_bytes: above what Python and torch take themselves.
        reply_bytes: of one answer.
    """

    call_seconds: float = 10.0
    start_seconds: float = 120.0
    total_seconds: float = 240.0
    memory_bytes: int = 1024 * MIB
    reply_bytes: int = 64 * MIB


LIMITS = Limits()


def readable(text: str) -> str:
    """Text from the process in one line, without what a terminal would obey."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:1000]


class Sandbox:
    """A submission in a process of its own, started when first asked and again after it has ended.

    Args:
        source: the text of the submission.
        modules: imported before the student's code runs.
        blocked: top-level packages that the student's code can't import.
        environment: variables beyond the few that every such process gets.
    """

    def __init__(
        self,
        source: str,
        modules: Sequence[str] = (),
        blocked: Sequence[str] = ("flce_ref", "course"),
        environment: dict[str, str] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(f"grading needs Linux, whose kernel keeps the limits, got {sys.platform}: use a container")
        self._modules, self._blocked, self.limits = tuple(modules), list(blocked), limits
        self._environment = environment or {}
        self._folder = Path(tempfile.mkdtemp(prefix="submission-"))
        self._folder.chmod(0o755)
        self._scratch = self._folder / "scratch"
        self._scratch.mkdir()
        self._scratch.chmod(0o777)
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = time.monotonic() + limits.total_seconds
        self.peak_bytes = 0
        self.functions: list[str] = []
        self.submit(source)

    def submit(self, source: str) -> None:
        """Take another submission. Only for code that is trusted: the process of the one before is kept."""
        self._source = self._folder / "submission.py"
        self._source.write_text(source, encoding="utf-8")
        self._source.chmod(0o644)
        self._loaded = False
        self._refused: str | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ what is asked

    def ask(self, do: str, arrays: Arrays | None = None, **header: Any) -> Arrays:
        """The arrays that the action ``do`` of child.py answers with.

        Raises:
            Failed: the student's code raised, or the answer is no answer.
            Ended: the process is gone. The next call starts another one, unless it went while the file was loaded.
        """
        self.load()
        return self._exchange(pack({"do": do} | header, arrays or []))[1]

    def load(self) -> list[str]:
        """Run the file if that has not been done; the names of its functions.

        Raises:
            Failed: it can't be run; said again at every call, without another attempt.
            Ended: all the time for the submission is used up.
        """
        if self._refused is not None:
            raise Failed(self._refused)
        if time.monotonic() >= self._ends:
            self.close()
            raise Ended(f"All {self.limits.total_seconds:g} seconds for this submission have been used.")
        if self._process is None:
            self._start()
        if not self._loaded:
            header = {"do": "load", "path": str(self._source), "blocked": self._blocked}
            try:
                told = self._exchange(pack(header, []))[0].get("functions")
            except (Failed, Ended) as error:
                self._refused = f"The file could not be run. {error}"
                raise Failed(self._refused) from None
            self.functions = [name for name in told if isinstance(name, str)] if isinstance(told, list) else []
            self._loaded = True
        return self.functions

    def resident_bytes(self) -> int:
        """The memory that the process has in RAM and in swap, as the kernel counts it.

        Raises:
            Ended: there is no process.
        """
        wanted, total = {"VmRSS:", "VmSwap:"}, 0
        with contextlib.suppress(OSError):
            assert self._process is not None
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.split()[0] in wanted:
                    total += int(line.split()[1]) * 1024
        if not total:  # a process that has ended has no memory
            raise self._end("The process ended")
        return total

    # ------------------------------------------------------------ the process

    def _start(self) -> None:
        requests_in, requests = os.pipe()
        replies, replies_out = os.pipe()
        user = 100_000 + os.getpid() % 100_000 if os.geteuid() == 0 else None
        settings = {
            "modules": self._modules,
            "user": user,  # one that nobody has: it owns no file, and can signal nobody else's process
            "memory_bytes": self.limits.memory_bytes,
            "seconds": int(self.limits.total_seconds) + 60,
            "requests": requests_in,
            "replies": replies_out,
        }
        environment = {
            "PATH": os.defpath,
            "HOME": str(self._scratch),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # What is freed goes back to the kernel at once, so that its count is that of what is held.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment | self._environment,
            cwd=self._scratch,
            pass_fds=(requests_in, replies_out),
            start_new_session=True,
        )
        os.close(requests_in)
        os.close(replies_out)
        self._channel = Channel(requests, replies, self._watch)
        self._loaded, self._base_bytes = False, None
        self._deadline = time.monotonic() + self.limits.start_seconds
        with contextlib.suppress(OSError):  # if memory runs out all the same, the kernel takes this process first
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
        try:
            why = self._channel.receive(self.limits.reply_bytes)[0].get("error")
        except (EOFError, ValueError, Ended) as error:
            why = str(error)
        if why is not None:
            self.close()
            raise RuntimeError(f"the process for student code can't be started here: {why}")
        self._base_bytes = self.resident_bytes()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._channel.close()
            self._process = None

    def _end(self, why: str) -> Ended:
        """Close, and say how the process went, or why it had to go."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            status = self._process.poll()
            if status is not None and status < 0:
                why += f" (killed: {signal.strsignal(-status)})"
            elif status is not None:
                why += f" (exit status {status})"
            self.close()
        return Ended(f"{why}.")

    # ------------------------------------------------------------ one question, one answer

    def _exchange(self, request: bytes) -> tuple[dict[str, Any], Arrays]:
        self.peak_bytes = self.resident_bytes()
        self._deadline = min(time.monotonic() + self.limits.call_seconds, self._ends)
        try:
            self._channel.send(request)
            header, arrays = self._channel.receive(self.limits.reply_bytes)
        except (EOFError, ValueError) as error:
            raise self._end(str(error)) from None
        if "error" in header:
            raise Failed(readable(str(header["error"])))
        return header, arrays

    def _watch(self) -> None:
        """Note the peak; end the process if its time or memory is used up."""
        if time.monotonic() > self._deadline:
            spent = "all its time" if self._deadline == self._ends else f"{self.limits.call_seconds:g} seconds"
            raise self._end(f"It did not finish within {spent}")
        if self._base_bytes is not None:
            held = self.resident_bytes()
            self.peak_bytes = max(self.peak_bytes, held)
            if held > self._base_bytes + self.limits.memory_bytes:
                raise self._end(f"It took more than {self.limits.memory_bytes // MIB} MiB of memory")
