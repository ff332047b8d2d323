"""What runs in the other process: the student's code, and the loop that hands it inputs and returns what it computed.

The grader starts ``python -I child.py`` with two pipes. A frame on a pipe is the length of its header, the header in
JSON, and the raw bytes of the arrays that the header describes; nothing is ever unpickled, and nothing that is sent
from here is believed: it is a number to be compared, whoever wrote it.

Before the first line of the student is run, :func:`confine` gives up every right that it can. This file imports
nothing of the project, so that the student's process does not hold the answers.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import resource
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64")
LENGTH = struct.Struct("<Q")
Arrays = list[tuple[str, np.ndarray]]  # (dtype name, values)
CAP_DAC_READ_SEARCH = 2
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38

# ---------------------------------------------------------------- frames


def stored_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which an array of dtype ``name`` is sent: NumPy has no bfloat16, its bits go as integers."""
    return np.dtype("int16" if name == "bfloat16" else name)


def pack(header: dict[str, Any], arrays: Arrays) -> bytes:
    """One frame; ``arrays`` are (dtype name, values)."""
    described = [{"dtype": name, "shape": list(values.shape)} for name, values in arrays]
    head = json.dumps(header | {"arrays": described}).encode()
    return b"".join([LENGTH.pack(len(head)), head, *(np.ascontiguousarray(values).tobytes() for _, values in arrays)])


def unpack(head: bytes, read: Any) -> tuple[dict[str, Any], Arrays]:
    """The header and arrays of a frame; ``read(count)`` returns that many bytes."""
    header = json.loads(head)
    arrays = []
    for described in header.pop("arrays"):
        name, shape = described["dtype"], described["shape"]
        count = math.prod(shape) * stored_dtype(name).itemsize
        arrays.append((name, np.frombuffer(read(count), stored_dtype(name)).reshape(shape)))
    return header, arrays


# ---------------------------------------------------------------- giving up rights


def confine(user: int | None, memory_bytes: int, seconds: int) -> None:
    """Become ``user`` (None: stay), and let the kernel refuse memory, processes, threads, files and time.

    Raises:
        OSError: the kernel did not allow it; the student's code is then not run.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if user is not None:
        keep = not _others_can_import()
        if keep:
            _prctl(libc, PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        if keep:
            _keep_only(libc, CAP_DAC_READ_SEARCH)
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    _prctl(libc, PR_SET_PDEATHSIG, 9)  # if the grader is killed
    limits = {
        resource.RLIMIT_DATA: _data_bytes() + memory_bytes,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in limits.items():
        resource.setrlimit(which, (value, value))


def _others_can_import() -> bool:
    """Whether another user can read the interpreter's own files: not where it was installed below /root."""
    for path in {sys.prefix, sys.base_prefix, os.path.dirname(np.__file__)}:
        while path != "/":
            if not os.stat(path).st_mode & 0o001:
                return False
            path = os.path.dirname(path)
    return True


def _keep_only(libc: ctypes.CDLL, capability: int) -> None:
    header = struct.pack("<Ii", 0x20080522, 0)
    mask = 1 << capability
    if libc.capset(header, struct.pack("<6I", mask, mask, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _data_bytes() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


# ---------------------------------------------------------------- the student's functions


class Submission:
    """The student's module, and the graph of the last forward."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.kept: tuple[Any, list[Any]] | None = None

    def load(self, path: str, blocked: list[str]) -> dict[str, Any]:
        """Run the file. The libraries that hold the answer can't be imported; a name in the way is no lock."""
        self.names, self.kept = {}, None
        for name in blocked:
            sys.modules[name] = None  # type: ignore[assignment]
        module = type(sys)("submission")
        module.__file__ = path
        sys.modules["submission"] = module  # where decorators look for the source
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), module.__dict__)
        self.names = module.__dict__
        return {"functions": [name for name, value in self.names.items() if callable(value)]}

    def function(self, name: str) -> Any:
        if not callable(self.names.get(name)):
            raise NameError(f"there is no function {name!r}")
        return self.names[name]

    def numbers(self, name: str, options: dict[str, Any], arrays: Arrays) -> Any:
        """A function of NumPy arrays and numbers that returns numbers or arrays."""
        returned = self.function(name)(*(values.copy() for _, values in arrays), **options)
        parts = returned if isinstance(returned, tuple) else (returned,)
        return [("float64", np.asarray(part, dtype=np.float64)) for part in parts]

    def forward(self, name: str, options: dict[str, Any], arrays: Arrays, wanted: list[bool]) -> Any:
        """A loss of tensors; its graph is kept for :meth:`backward`, the one before it is dropped."""
        self.kept = None
        tensors = [to_torch(*array) for array in arrays]
        for tensor, needs in zip(tensors, wanted, strict=False):
            tensor.requires_grad_(needs)
        loss = self.function(name)(*tensors, **options)
        self.kept = loss, [tensor for tensor in tensors if tensor.requires_grad]
        return [from_torch(loss)]

    def backward(self, arrays: Arrays) -> Any:
        """The gradients of the last forward's loss; the graph is kept, as under retain_graph."""
        import torch

        assert self.kept is not None
        loss, leaves = self.kept
        upstream = to_torch(*arrays[0]).to(loss.dtype).reshape(loss.shape)
        gradients = torch.autograd.grad(loss, leaves, upstream, retain_graph=True, allow_unused=True)
        missing = [torch.full_like(leaf, math.nan) for leaf in leaves]
        return [from_torch(lost if g is None else g) for g, lost in zip(gradients, missing, strict=True)]

    def in_place(self, name: str, options: dict[str, Any], arrays: Arrays, shape: list[int], stride: int) -> Any:
        """A kernel that overwrites logits (C, V) lying ``stride`` apart in a buffer: its result, and the buffer."""
        buffer, *rest = (to_torch(*array) for array in arrays)
        logits = buffer.as_strided(shape, (stride, 1), 0)
        returned = self.function(name)(logits, *rest, **options)
        return [from_torch(returned), from_torch(buffer)]


def to_torch(name: str, values: np.ndarray) -> Any:
    import torch

    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor


def from_torch(tensor: Any) -> tuple[str, np.ndarray]:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().contiguous()
    return name, (tensor.view(torch.int16) if name == "bfloat16" else tensor).numpy()


# ---------------------------------------------------------------- the loop


def serve(requests: BinaryIO, replies: int) -> None:
    """Answer requests until the grader closes the pipe."""
    submission = Submission()
    names = ("load", "numbers", "forward", "backward", "in_place")
    actions: dict[str, Callable[..., Any]] = {name: getattr(submission, name) for name in names}
    while head := requests.read(LENGTH.size):
        header, arrays = unpack(requests.read(*LENGTH.unpack(head)), requests.read)
        action = header.pop("do")
        if action != "load":
            header["arrays"] = arrays
        try:
            result = actions[action](**header)
            frame = pack(result, []) if isinstance(result, dict) else pack({}, result)
        except BaseException as error:  # sys.exit() too
            frame = pack({"error": told(error)}, [])
        send(replies, frame)


def send(replies: int, frame: bytes) -> None:
    """Write all of the frame: a pipe takes it in pieces."""
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(replies, rest) :]


def told(error: BaseException) -> str:
    """The error, and the line of the submission at which it came out."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith("submission.py")]
    where = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:400]}{where[:200]}"


def main() -> None:
    settings = json.loads(sys.argv[1])
    try:
        for name in settings["modules"]:
            importlib.import_module(name)
        confine(settings["user"], settings["memory_bytes"], settings["seconds"])
    except (ImportError, OSError) as error:
        send(settings["replies"], pack({"error": told(error)}, []))
        return
    tempfile.tempdir = os.getcwd()  # where libraries may make folders; nothing can be written, and none tries
    send(settings["replies"], pack({"ready": True}, []))
    serve(os.fdopen(settings["requests"], "rb"), settings["replies"])


if __name__ == "__main__":
    main()
